"""What a shell script would run: bash itself reads it, shut off from everything, and its commands are written down."""

from nemorl_compat.shell.expanding import Expanded, expand

__all__ = ["Expanded", "expand"]
