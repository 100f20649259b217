"""Models on disk: tensor pieces, the checkpoint store, model families, file formats and conversion."""
