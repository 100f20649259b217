"""What sees images before a decoder: a tower of the decoder's own layers, a projector, and who computes which image."""
