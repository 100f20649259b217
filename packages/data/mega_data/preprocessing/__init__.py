"""Preprocessing of documents to token files."""
