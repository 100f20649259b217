"""Fault tolerance, monitoring and bookkeeping of a run; nothing here changes what a step computes."""
