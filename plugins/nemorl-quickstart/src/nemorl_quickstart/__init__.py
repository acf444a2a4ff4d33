"""The guided first run of nemorl: ``nemorl quickstart``."""
