"""Shared foundation of all mega packages: errors, configuration, files, object stores and logging, without torch."""
