"""Compute kernels; the only folder that imports accelerator libraries."""
