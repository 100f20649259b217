"""Process groups, collectives, devices and random numbers of ranks."""
