"""Start of the ranks of a run: local processes, torchrun, restarts."""
