"""Another set of plugins for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nemorl.plugins.registry import Registry, replace_registry


@contextmanager
def use_registry(scoped: Registry) -> Iterator[Registry]:
    """Make ``scoped`` the registry of this process inside the block, in all its threads."""
    before = replace_registry(scoped)
    try:
        yield scoped
    finally:
        replace_registry(before)
