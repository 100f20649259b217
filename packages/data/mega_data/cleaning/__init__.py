"""Cleaning of corpora: text in, text out, before it is tokenized. What goes is kept beside, with rule and reason."""
