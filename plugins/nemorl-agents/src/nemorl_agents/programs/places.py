"""Where programs are looked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def search_path() -> str:
    """``PATH`` of agents: the folder of this interpreter first, so that ``python`` is the one that runs nemorl."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
