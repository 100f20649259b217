"""Images of conversations: preprocessing, references, pixels and samples."""
