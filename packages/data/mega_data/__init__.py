"""Text to token files, and token files to batches (Megatron's indexed format)."""
