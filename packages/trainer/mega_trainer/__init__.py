"""The 5D-parallel trainer: its model, its groups, its schedule and its loop."""
