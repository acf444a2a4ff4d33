"""Config templates for nemorl."""
