"""Tensors from one process to others: what is received is what was sent, also by groups that torch makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from nemorl_tensors.engines.broadcast import BroadcastGroup, Meeting, listening_for

LIMIT_S = 20.0
SENT = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
Received = list[torch.Tensor]


def started(member: Callable[[], Received]) -> Future[Received]:
    answer: Future[Received] = Future()

    def run() -> None:
        try:
            answer.set_result(member())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def empties() -> Received:
    return [torch.empty_like(tensor) for tensor in SENT.values()]


def own_member(meeting: Meeting, rank: int) -> Received:
    group = BroadcastGroup(meeting, rank, timeout_s=LIMIT_S)
    return [group.broadcast(tensor) for tensor in empties()]


def torchs_member(meeting: Meeting, rank: int) -> Received:
    """As engines make a named group beside their own (``init_custom_process_group`` of SGLang and others)."""
    where, limit = f"tcp://{meeting.address}:{meeting.port}", timedelta(seconds=LIMIT_S)
    store, rank, ranks = next(c10d.rendezvous(where, rank, meeting.ranks, timeout=limit))  # type: ignore[no-untyped-call]
    named = c10d.PrefixStore(meeting.name, store)
    make: Any = c10d._new_process_group_helper
    group, _ = make(ranks, rank, [], c10d.Backend("gloo"), named, group_name=meeting.name, timeout=limit)
    received = empties()
    for tensor in received:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([tensor], options).wait()
    return received


def test_every_member_receives_what_was_sent_in_order() -> None:
    address, listening = listening_for("http://127.0.0.1:8000")
    meeting = Meeting(address, listening.getsockname()[1], ranks=3)
    members = [started(lambda: own_member(meeting, 1)), started(lambda: torchs_member(meeting, 2))]
    group = BroadcastGroup(meeting, 0, timeout_s=LIMIT_S, listening=listening)
    for tensor in SENT.values():
        group.broadcast(tensor)
    for member in members:
        for found, sent in zip(member.result(LIMIT_S), SENT.values(), strict=True):
            assert torch.equal(found, sent)


def test_a_group_whose_members_do_not_come_is_an_error() -> None:
    address, listening = listening_for("http://127.0.0.1:8000")
    with pytest.raises(RuntimeError):
        BroadcastGroup(Meeting(address, listening.getsockname()[1], ranks=2), 0, timeout_s=0.2, listening=listening)


def test_the_address_is_the_one_by_which_a_server_reaches_this_machine() -> None:
    found, listening = listening_for("http://127.0.0.1:8000")
    listening.close()
    assert found == "127.0.0.1"
