"""Model parallelism: tensor, context and expert parallel layers, ZeRO, and their collectives."""
