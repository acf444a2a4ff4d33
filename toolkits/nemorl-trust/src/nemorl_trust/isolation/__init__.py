"""Plugins in processes of their own, and the parts of sandboxes for any process that is about to run foreign code.

These parts (Landlock, a list of system calls, capabilities; Linux, standard library only) are modules of no package: a
fresh interpreter (``python -I``) puts ``CONFINEMENT`` on its path and imports ``landlock``, ``seccomp`` and ``libc``
from there; nothing of nemorl is needed.
"""

from pathlib import Path

CONFINEMENT = Path(__file__).with_name("confinement")
