"""Neighbours of chunks of text, found before a run that reads them (Retro: Borgeaud et al., arXiv:2112.04426)."""
