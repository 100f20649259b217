"""Evaluation and inference of mega and HuggingFace checkpoints."""
