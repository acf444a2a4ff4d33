"""Environments, the code sandbox, datasets and the quickstart."""
