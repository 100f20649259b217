"""Samples of a step as tensors: micro-batches, packed rows, and the check of a run's data."""
