"""Checkpoint formats of other software."""
