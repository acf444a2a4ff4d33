"""The commands of a shell script: bash itself reads it, shut off from everything, and they are written down."""

from nemorl_compat.shell.expanding import Expanded, expand

__all__ = ["Expanded", "expand"]
