"""First steps with nemorl: ``nemorl quickstart``, ``nemorl config try``."""
