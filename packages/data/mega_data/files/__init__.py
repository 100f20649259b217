"""Token files: Megatron's indexed format, its companions, and what is done to whole files."""
