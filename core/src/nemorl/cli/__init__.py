"""The ``nemorl`` command. Importing it imports neither torch nor ray; commands do when they run."""

from nemorl.cli.app import main

__all__ = ["main"]
