"""``build()`` of a plugin returns the part, and not nothing: told where it is built, with whose it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from nemorl.errors import PluginError


def checked_build(build: Callable[..., Any], *, may_be_none: bool) -> Callable[..., Any]:
    """A method ``build`` that refuses to return nothing, or a class where an object belongs.

    Args:
        build: As the plugin's config class defines it.
        may_be_none: ``None`` is an answer, as for a split that a dataset does not have.
    """

    @wraps(build)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        part = build(self, *arguments, **options)
        if isinstance(part, type) or (part is None and not may_be_none):
            what = "nothing" if part is None else f"the class {part.__name__}, not an object of it"
            owner = f"{type(self).__module__}:{type(self).__qualname__}"
            raise PluginError(f"build() of {owner} returned {what}", fix="end it with `return`, and the part itself")
        return part

    return checked
