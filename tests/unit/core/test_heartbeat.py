"""When a group hangs, by hand: pulses of ranks at given seconds, and the ranks that are named."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from nemorl.resources.heartbeat import COUNTERS, Hang, HangWatch, Pulse, count_by, pulse_of

WAITING = Pulse({"0": 7}, ("ranks.py:12 in total_norm", "distributed_c10d.py:3252 in all_reduce"), "all_reduce", 0.0)
BEHIND = Pulse({"0": 6}, ("steps.py:40 in train_step", "data.py:3 in read"), "", 0.0)
T = 60.0


def played(*ranks: list[tuple[float, Pulse]], until_s: float = 200.0) -> tuple[float | None, Hang | None]:
    """The second at which the hang shows, from each rank's answers; looked at every second."""
    watch = HangWatch(T, 0.0)
    for second in range(int(until_s)):
        for rank, answers in enumerate(ranks):
            for at_s, pulse in answers:
                if at_s == second:
                    watch.record(rank, pulse, float(second))
        hang = watch.hang(range(len(ranks)), float(second))
        if hang is not None:
            return float(second), hang
    return None, None


def every_ten(pulse: Pulse, *, busy: float = 0.0, moving: bool = False) -> list[tuple[float, Pulse]]:
    """The same answer at 10, 20, ... s, with ``busy`` of a core used meanwhile."""
    answers = []
    for at_s in range(10, 200, 10):
        stack = (f"steps.py:{at_s} in train_step",) if moving else pulse.stack
        answers.append((float(at_s), Pulse(pulse.counts, stack, pulse.waits_in, busy * at_s)))
    return answers


def test_a_rank_that_never_answers_is_missing_as_soon_as_the_others_have_stood_that_long() -> None:
    at_s, hang = played(every_ten(WAITING), [])
    assert at_s == 10 + T  # rank 0 is seen to stand from 10 s on; rank 1 has been silent since 0 s
    assert hang is not None
    assert hang.missing == [1]


def test_a_rank_that_stands_elsewhere_while_others_wait_is_missing_and_its_line_is_told() -> None:
    at_s, hang = played(every_ten(WAITING), every_ten(BEHIND), every_ten(WAITING))
    assert at_s == 10 + T
    assert hang is not None
    assert hang.missing == [1]
    assert "data.py:3 in read" in hang.reports[1]
    assert "all_reduce" in hang.reports[0]


@pytest.mark.parametrize("rank", [every_ten(BEHIND, busy=0.5), every_ten(BEHIND, moving=True)], ids=["busy", "moving"])
def test_a_rank_at_work_is_no_hang_however_long_the_others_wait(rank: list[tuple[float, Pulse]]) -> None:
    assert played(every_ten(WAITING), rank) == (None, None)


def test_the_helper_threads_of_an_idle_process_are_no_work() -> None:
    assert played(every_ten(WAITING), every_ten(BEHIND, busy=0.03))[0] == 10 + T


def test_ranks_that_all_do_something_alone_wait_for_nobody() -> None:
    assert played(every_ten(BEHIND), every_ten(BEHIND)) == (None, None)


def test_a_gpu_s_rank_that_spins_for_a_collective_waits_since_it_is_ahead() -> None:
    # It waits for its GPU at a line that names no collective, and uses a core for that; its count says that it entered.
    spinning = Pulse({"0": 7}, ("steps.py:90 in item",), "", 0.0)
    at_s, hang = played(every_ten(spinning, busy=1.0), every_ten(BEHIND))
    assert at_s == 10 + T
    assert hang is not None
    assert hang.missing == [1]


def test_where_all_wait_those_that_entered_fewer_collectives_are_missing() -> None:
    other = Pulse({"0": 6}, WAITING.stack, "all_gather", 0.0)
    hang = played(every_ten(WAITING), every_ten(other))[1]
    assert hang is not None
    assert hang.missing == [1]
    # A network that swallows everything: nobody is behind, all are named.
    hang = played(every_ten(WAITING), every_ten(WAITING))[1]
    assert hang is not None
    assert hang.missing == [0, 1]


def test_work_that_ends_in_standing_counts_from_its_end() -> None:
    moving = [(at_s, pulse) for at_s, pulse in every_ten(BEHIND, moving=True) if at_s < 50]
    standing = [(at_s, pulse) for at_s, pulse in every_ten(BEHIND) if at_s >= 50]
    assert played(every_ten(WAITING), [*moving, *standing])[0] == 50 + T


def test_a_pulse_tells_where_another_thread_is_and_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl.resources.heartbeat.COUNTERS", [])
    held = threading.Event()

    def waits_here() -> None:
        held.wait(30.0)

    thread = threading.Thread(target=waits_here)
    thread.start()
    time.sleep(0.2)
    assert thread.ident is not None
    pulse = pulse_of(thread.ident)
    held.set()
    thread.join()
    assert any(frame.endswith("in waits_here") for frame in pulse.stack)
    assert (pulse.counts, pulse.waits_in) == ({}, "")
    assert pulse_of(0).stack == ()


def test_a_counter_that_fails_silences_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl.resources.heartbeat.COUNTERS", [lambda: {"one": 1}, lambda: {"two": 1 // 0}])
    assert pulse_of(0).counts == {"one": 1}


def test_a_driver_that_stood_still_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, a suspended job or machine: nobody was asked, so nobody is silent."""
    from nemorl.resources.ray_pulses import Pulses

    class Rank:
        """It never answers."""

        pulse = property(lambda self: self)

        def options(self, **_: Any) -> Rank:
            return self

        def remote(self) -> object:
            return object()

    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("ray.wait", lambda asked, **_: ([], asked))
    pulses = Pulses(60.0)
    now_s[0] = 1000.0
    assert pulses.hang({0: Rank()}) is None
    found = []
    while not found:
        now_s[0] += 1.0
        found += filter(None, [pulses.hang({0: Rank()})])
    assert (found[0].missing, now_s[0]) == ([0], 1060.0)


def test_a_counter_is_carried_once() -> None:
    before = [*COUNTERS]
    try:
        count_by(dict)
        count_by(dict)
        assert [*COUNTERS] == [*before, dict]
    finally:
        COUNTERS[:] = before


def test_torch_numbers_the_collectives_that_a_process_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist
    from nemorl_tensors.engines.collectives import collectives_entered

    assert collectives_entered() == {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ((name, before),) = collectives_entered().items()
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        assert collectives_entered() == {name: before + 3}
        monkeypatch.setattr(dist.distributed_c10d, "_pg_names", {})  # it leaves while it is asked
        assert collectives_entered() == {}
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
