"""The `mega` command."""
