"""How idle the generator of asynchronous rollouts is, by hand."""

from __future__ import annotations

from nemorl_rl.busy_time import BusyTime


def test_what_overlaps_counts_once_and_what_goes_on_counts_in_the_next_span() -> None:
    work = BusyTime(10.0)
    work.begin(12.0)
    work.begin(13.0)
    work.end(14.0)
    assert work.idle(16.0).value == 2 / 6  # idle from 10 to 12 of 10 to 16
    work.end(17.0)
    assert work.idle(20.0).value == 3 / 4  # idle from 17 to 20 of 16 to 20


def test_no_time_is_no_idle_time() -> None:
    assert BusyTime(1.0).idle(1.0).value == 0.0
