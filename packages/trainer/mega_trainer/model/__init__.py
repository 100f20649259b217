"""One decoder for many families: a family is a configuration and a name table."""
