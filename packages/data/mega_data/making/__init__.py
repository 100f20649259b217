"""Documents to token files, by several workers, in parts, resumed where they were killed."""
