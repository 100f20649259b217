"""What there is to know of token files, for people."""
