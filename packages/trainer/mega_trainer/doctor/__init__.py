"""Examination of a machine: kernels, speeds, groups, runs and failures, each against an expectation."""
