"""Where the parts of sandboxes are: Landlock, a list of system calls, capabilities. Linux, standard library only.

They are modules of no package. A process that is about to run foreign code, in a fresh interpreter (``python -I``),
puts ``FOLDER`` on its path and imports ``landlock``, ``seccomp`` and ``libc`` from there; nothing of nemorl is needed.
"""

from pathlib import Path

FOLDER = Path(__file__).with_name("confinement")
