"""Experiments of several runs: sweeps over settings, comparison of seeds, scaling laws."""
