"""A run's needs of its devices, before and while it runs: memory, work and who is awake when."""
