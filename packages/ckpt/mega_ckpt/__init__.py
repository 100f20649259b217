"""What a model is on disk: pieces, the checkpoint store, families and formats, conversion."""
