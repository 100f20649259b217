"""The small leaf that every package of mega stands on: errors, configuration, files, log. Imports no torch."""
