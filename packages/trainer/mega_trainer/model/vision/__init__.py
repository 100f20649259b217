"""Vision-language models: a vision encoder, a projector, and the split of images among ranks."""
