"""Heartbeats over Ray: the ranks of one call are asked how they are, once it takes long."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from nemorl.resources.heartbeat import LOOKS, Hang, HangWatch
from nemorl.resources.ray_actor import PULSE


class Pulses:
    """The heartbeats of one call.

    Nothing is sent before the call has lasted a sixth of ``timeout_s``, and one small message per rank and sixth from
    then on: calls that are shorter cost nothing.
    """

    def __init__(self, timeout_s: float) -> None:
        """
        Args:
            timeout_s: ``cluster.hang_timeout_s``.
        """
        now_s = time.monotonic()
        self._watch = HangWatch(timeout_s, now_s)
        self._every_s = timeout_s / LOOKS
        self._next_s = now_s + self._every_s
        self._asked: dict[Any, int] = {}
        """Ranks by what they have not yet answered."""

    def hang(self, actors: Mapping[int, Any]) -> Hang | None:
        """The group's hang, if it does. Returns at once.

        Args:
            actors: Those whose answer to the call is due, by rank.
        """
        now_s = time.monotonic()
        if now_s >= self._next_s + self._every_s:  # this process stood still itself, and could ask nobody
            self._watch = HangWatch(self._watch.timeout_s, now_s)
        if self._asked:
            for answer in ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0]:
                rank = self._asked.pop(answer)
                with suppress(RayError):  # who is dead says so in the answer to the call itself
                    self._watch.record(rank, ray.get(answer), now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            silent = set(self._asked.values())
            asked = {rank: actor.pulse.options(concurrency_group=PULSE) for rank, actor in actors.items()}
            self._asked |= {call.remote(): rank for rank, call in asked.items() if rank not in silent}
        return self._watch.hang(actors, now_s)
