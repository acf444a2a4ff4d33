"""The conformance kit: what every plugin of a kind must do, as tests that a plugin's own package runs.

A whole test file of a plugin package:

>>> from nemorl_testing import conformance
>>> test_my_backend = conformance("training_backends", "mine")

pytest then collects one test per clause of the contract. ``check_plugin`` does the same outside pytest.

Names load on first use: pytest imports this package in every session of an environment that has nemorl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# ruff: noqa: F403, F405
if TYPE_CHECKING:
    from nemorl_testing.kit import *

__all__ = [
    "Check",
    "ConformanceError",
    "NotApplicable",
    "Report",
    "Settings",
    "check_plugin",
    "checks_for",
    "conformance",
    "run_checks",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("nemorl_testing.kit"), name)
