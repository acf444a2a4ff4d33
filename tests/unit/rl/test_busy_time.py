"""How busy the generator of asynchronous rollouts is, by hand."""

from __future__ import annotations

from nemorl_rl.rollouts.buffer import BusyTime


def test_what_overlaps_counts_once_and_what_goes_on_counts_in_the_next_span() -> None:
    work = BusyTime(10.0)
    work.begin(12.0)
    work.begin(13.0)
    work.end(14.0)
    assert work.taken(16.0) == (4.0, 6.0)  # busy from 12 to 16 of 10 to 16
    work.end(17.0)
    assert work.taken(20.0) == (1.0, 4.0)  # busy from 16 to 17 of 16 to 20
