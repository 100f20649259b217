"""Formats of other software."""
