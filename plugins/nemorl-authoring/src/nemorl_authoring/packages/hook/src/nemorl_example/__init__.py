"""A hook for nemorl."""
