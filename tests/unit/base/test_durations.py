"""Lengths of time in configs."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from nemorl.base.text.scalars import Duration, WrongValueError, seconds
from nemorl.config import Config
from pydantic import ValidationError
from recorded_messages import Raises


@pytest.mark.parametrize(
    ("text", "wanted_s"),
    [
        ("00:03:45:00", 3 * 3600 + 45 * 60),  # NeMo RL's DD:HH:MM:SS
        ("01:00:00:01", 86_401),
        ("3h45m", 13_500),
        ("1d 12h", 129_600),
        ("90m", 5_400),
        ("1.5h", 5_400),
        ("20s", 20),
    ],
)
def test_a_length_of_time_is_so_many_seconds(text: str, wanted_s: float) -> None:
    assert seconds(text) == wanted_s


@pytest.mark.parametrize("value", ["", "03:45:00", "3 hours", "45", 13_500, "00:00:00:00", "0h", "m3", True])
def test_anything_else_is_refused_with_both_ways_to_write_it(value: Any) -> None:
    with pytest.raises(WrongValueError) as refused:
        seconds(value)
    assert "DD:HH:MM:SS" in refused.value.fix
    assert "3h45m" in refused.value.fix


def test_a_field_keeps_what_was_written(raises: Raises) -> None:
    class Job(Config):
        limit: Annotated[str | None, Duration()] = None
        """Longest time."""

    assert Job(limit="3h45m").limit == "3h45m"
    assert Job(limit=None).limit is None
    with raises(ValidationError, "'soon'", path="limit"):
        Job(limit="soon")
