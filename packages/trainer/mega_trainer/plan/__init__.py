"""The planner: what a run costs in arithmetic, memory and time, told before any device is touched."""
