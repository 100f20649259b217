"""Optimizers over flat buffers, and the learning-rate schedule."""
