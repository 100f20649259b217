"""Conversations: records to messages, messages to text by a chat template, text to tokens and the weight of each."""
