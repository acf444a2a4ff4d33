"""When two numbers count as equal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def is_equal(first: Any, second: Any, tolerance: float) -> bool:
    """Equal, both NaN, or within ``tolerance`` of each other, relative to the larger one or absolute.

    >>> is_equal(1.0, 1.0 + 1e-7, 1e-6), is_equal(1.0, 1.0 + 1e-7, 0.0), is_equal(float("nan"), float("nan"), 0.0)
    (True, False, True)
    """
    if isinstance(first, float) and isinstance(second, float):
        if math.isnan(first) or math.isnan(second):
            return math.isnan(first) and math.isnan(second)
        return first == second or (tolerance > 0 and math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance))
    return bool(first == second)


def unequal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], tolerance: float) -> np.ndarray[Any, Any]:
    """The same of two float arrays of one shape, element by element: True where they differ."""
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    if tolerance > 0:
        with np.errstate(invalid="ignore"):  # infinity less infinity
            larger = np.maximum(np.maximum(np.abs(first), np.abs(second)), 1.0)
            same |= np.isfinite(larger) & (np.abs(first - second) <= tolerance * larger)
    return np.asarray(~same)
