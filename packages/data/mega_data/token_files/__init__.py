"""Token data sets on disk: reading, writing, descriptions, merging, shuffling and verification."""
