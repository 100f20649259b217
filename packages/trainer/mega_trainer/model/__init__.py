"""Transformer models: one decoder for many families, where a family is a configuration and a table of tensor names."""
