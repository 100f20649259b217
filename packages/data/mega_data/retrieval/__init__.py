"""Retrieval of neighbors for Retro: chunks, embeddings, nearest-neighbor search and neighbor files."""
