"""Conversations: records, chat templates and encoding with loss masks."""
