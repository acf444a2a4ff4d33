"""The ``nemorl`` command. Importing it imports neither torch nor ray; commands do when they run."""

import gc

# Importing makes many objects and no garbage, yet looking for some takes a third of the time of `nemorl plugins list`.
gc.disable()

from nemorl_cli.app import main  # noqa: E402

gc.freeze()  # what is there now stays, and need not be looked at again, at exit either
gc.enable()
__all__ = ["main"]
