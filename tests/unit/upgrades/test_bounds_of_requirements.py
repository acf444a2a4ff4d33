"""What tried versions say of a requirement, worked out by hand."""

from __future__ import annotations

import pytest
from nemorl_insight.doctor.upgrades.bounds import supported
from packaging.specifiers import SpecifierSet


@pytest.mark.parametrize(
    ("now", "tried", "after"),
    [
        # 5.19 is installed and works. A version beyond the upper bound that works moves it to the next minor one.
        (">=5.10,<5.19", {"5.18.0": True}, ">=5.10,<5.20"),
        (">=5.10,<5.20", {"5.24.0": True}, ">=5.10,<5.25"),
        (">=5.10,<5.20", {"5.9.1": True}, ">=5.9.1,<5.20"),
        # One that breaks becomes the bound itself; the version before it that works is the other end.
        (">=5.0", {"5.24.0": False}, ">=5.0,<5.24"),
        (">=4.57", {"5.0.0": False, "5.10.1": True}, ">=5.10.1"),
        # Beyond a break nothing counts.
        (">=5.10,<5.20", {"5.22.0": False, "5.24.0": True}, ">=5.10,<5.20"),
        (">=5.10", {"5.20.2": True, "5.22.0": False, "5.24.0": True}, ">=5.10,<5.22"),
        # Within the bounds, and working: as it was.
        (">=5.10,<5.20", {"5.15.1": True}, ">=5.10,<5.20"),
        (">=5.0", {"5.24.0": True}, ">=5.0"),
        # What is written otherwise is left alone.
        ("~=5.10", {"5.24.0": False}, "~=5.10"),
        ("!=5.11,>=5.0", {"4.57.6": True}, ">=5.0,!=5.11"),
    ],
)
def test_bounds_follow_what_was_seen(now: str, tried: dict[str, bool], after: str) -> None:
    assert supported(SpecifierSet(now), "5.19.0", tried)[0] == after


def test_the_reason_names_the_version() -> None:
    assert supported(SpecifierSet(">=2.40"), "2.60.0", {"2.41.0": False, "2.59.0": True})[1] == "2.41.0 breaks"


def test_a_local_build_is_a_version_like_its_public_one() -> None:
    assert supported(SpecifierSet(">=2.9"), "2.13.0+cpu", {"2.14.1": True})[0] == ">=2.9"
