"""The YAML files. nemorl reads them without importing anything."""
