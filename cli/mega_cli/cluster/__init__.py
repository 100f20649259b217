"""What starts the ranks of a run on the machines of a cluster."""
