"""A command for nemorl."""
