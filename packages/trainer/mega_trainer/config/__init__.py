"""Configuration of a run: the schema of run.yaml and its rules. Imports no torch."""
