"""Reading of corpora: sources, formats and documents."""
