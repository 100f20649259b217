"""Verification of a model in parallel layouts: tiny runs on several processes against one process (`mega verify`)."""
