"""What the corpora are that people have: files, folders and data sets, packed or not, to documents."""
