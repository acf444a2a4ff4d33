"""pytest plugin of nemorl (loaded by pytest itself, so it must stay free of heavy imports)."""
