"""``python -m nemorl``: the ``nemorl`` script, where nemorl-commands is installed."""

import sys
from importlib.metadata import entry_points

scripts = entry_points(group="console_scripts", name="nemorl")
if not scripts:
    sys.exit("error: nemorl has no command line here\n  fix: pip install nemorl-commands")
next(iter(scripts)).load()()
