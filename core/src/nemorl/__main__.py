"""``python -m nemorl``."""

from nemorl.supervisor import run

run()
