"""Planner: predicts the FLOPs, memory and time of a run without using any device."""
