"""The `mega` command."""

__version__ = "0.1.0"
