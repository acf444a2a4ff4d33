"""``python -m nemorl``: the ``nemorl`` script, where nemorl-cli is installed."""

import sys

from nemorl.base.packages.distributions import installed, points_of

points = (point for dist in installed() for point in points_of(dist, "console_scripts")[0])
script = next((point for point in points if point.name == "nemorl"), None)
if script is None:
    sys.exit("error: nemorl has no command line here\n  fix: pip install nemorl-cli")
script.load()()
