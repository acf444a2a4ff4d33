"""A config module that makes `nemorl plugins show` wait for a library."""

import numpy as np

from broken.configs import Sound


class Heavy(Sound):
    """Imports numpy to have a default."""

    patience_s: float = float(np.float64(1.0))
    """How long to wait, in seconds."""
