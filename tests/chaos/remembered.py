"""What each life of a run would find out about the machine anew, none of it in its folder: found out once, and forked.

A quarter of the processor time of a tiny run goes into that: hashes of plugins' files, versions of libraries, git.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

from nemorl_trust import lock, provenance


def remember() -> None:
    """From now on, in this process and its forks."""
    _once(lock, "files_of", lambda entries: entries[0].distribution)
    _once(lock, "hash_of", lambda files: tuple(files.values()))
    _once(provenance, "_version", lambda distribution: distribution)
    _once(provenance, "_git", lambda: None)


def _once(module: ModuleType, name: str, key: Callable[..., Hashable]) -> None:
    real, found = getattr(module, name), {}

    def remembered(*arguments: Any) -> Any:
        about = key(*arguments)
        if about not in found:
            found[about] = real(*arguments)
        return found[about]

    setattr(module, name, remembered)
