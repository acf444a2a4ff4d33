"""A report section for nemorl."""
