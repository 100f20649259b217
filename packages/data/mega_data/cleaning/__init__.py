"""Cleaning of corpora: filters, deduplication and decontamination."""
