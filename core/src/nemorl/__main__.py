"""``python -m nemorl``."""

from nemorl.cli import main

main()
