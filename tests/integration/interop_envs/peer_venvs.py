"""Virtual environments with other projects' packages, which may want other versions than ours of what both need."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

KEPT = "NEMORL_PEER_VENVS"
"""Names a folder in which these environments are kept, so that they are made once."""


def peer_python(folder: Path, *requirements: str, with_ours: bool = False) -> str:
    """The interpreter of an environment that has these packages.

    Args:
        folder: Where it is made, unless they are kept.
        *requirements: Of pip.
        with_ours: What is installed for the tests can be imported as well, where the environment lacks it.
    """
    name = "".join(letter if letter.isalnum() else "-" for letter in " ".join([*requirements, str(with_ours)]))
    home = Path(os.environ.get(KEPT, folder)) / name
    python = home / "bin" / "python"
    done = home / "done"
    if not done.exists():
        venv.create(home, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *requirements]
        subprocess.run(pip, check=True, timeout=900)
        if with_ours:
            packages = next(home.glob("lib/python*/site-packages"))
            ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            (packages / "zz_ours.pth").write_text(ours)
        done.touch()
    return str(python)
