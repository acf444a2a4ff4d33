"""The answers of the ranks of a group: waited for until a deadline, and told as errors where they do not come.

A rank that dies or does not answer is reported by group, rank, node and process, with the last lines of its log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemorl.errors import BackendError, ForeignError, NemorlError, ResourceError, WorkerHungError, WorkerLostError
from nemorl.resources.failure_texts import Failure, failure_in
from nemorl.resources.heartbeat import Hang
from nemorl.resources.ray_errors import FIXES, fate_of, in_words
from nemorl.resources.ray_pulses import Pulses
from nemorl.resources.ray_ranks import Rank

FAILURE_S = 1.0
"""A rank that failed ends the wait for the others at most this late. Waiting for one answer at a time would ask Ray
about all ranks as often as there are ranks."""
UNWATCHED = frozenset({"start", "build", "attach_engine"})
"""Calls in which ranks may read for long, each for itself, and do not answer meanwhile."""
BLAME_S = 5.0
"""Time to look for a dead rank when another one fails: peers of a dead rank report a broken connection first."""
START_FAILED = "raised in its creation task"
"""In Ray's words on an actor whose constructor raised"""
_MISSING_MODULE = re.compile(r"No module named '([^'.]+)'")


class Answers:
    """The waits of one group. A rank whose answer does not come is marked as lost."""

    def __init__(self, timeout_s: float, hang_timeout_s: float | None) -> None:
        """
        Args:
            timeout_s: Longest wait for a call.
            hang_timeout_s: Longest time in which no rank gets on. Unset: ranks do not wait for each other, or nobody
                is to look.
        """
        self.timeout_s, self.hang_timeout_s = timeout_s, hang_timeout_s

    def gather(self, what: str, calls: Mapping[Rank, Any]) -> dict[int, Any]:
        """Results by rank number, in the order of ``calls``; the first failure ends the wait."""
        deadline = time.monotonic() + self.timeout_s
        pending = {reference: rank for rank, reference in calls.items()}
        results: dict[int, Any] = {}
        pulses = self._pulses(what)
        while pending:
            if pulses and (hang := pulses.hang({rank.number: rank.actor for rank in pending.values()})):
                raise self._stuck(what, [*pending.values()], hang)
            left_s = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=min(FAILURE_S, left_s))
            if not ready and left_s == 0:
                raise self._hung(what, sorted(pending.values(), key=attrgetter("number")))
            ranks = [pending.pop(reference) for reference in ready]
            others = {**dict(zip(ready, ranks, strict=True)), **pending}
            results |= zip((rank.number for rank in ranks), self._values(what, others, ready), strict=True)
        return {rank.number: results[rank.number] for rank in calls}

    def _pulses(self, what: str) -> Pulses | None:
        """The heartbeats of a call whose ranks may wait for each other; ``None``: they do not, or nobody is to look."""
        return None if self.hang_timeout_s is None or what in UNWATCHED else Pulses(self.hang_timeout_s)

    def _values(self, what: str, ranks: dict[Any, Rank], ready: Sequence[Any]) -> list[Any]:
        """The results behind references that are ready, all at once; one by one only to find the rank that failed."""
        try:
            found: list[Any] = ray.get(list(ready))
            return found
        except RayError:
            return [self.read(what, ranks.pop(one), partial(ray.get, one), ranks) for one in ready]

    def read(self, what: str, rank: Rank, get: Callable[[], Any], others: Mapping[Any, Rank]) -> Any:
        """The result of a call by ``get``, or its error with the rank's name."""
        try:
            return get()
        except RayError as error:
            if fate_of(error) == "worker":
                raise self._lost(what, rank, error) from error
            if not isinstance(error, RayTaskError):
                raise ResourceError(f"{rank.who}, {what}: {in_words(error)}", fix=FIXES[fate_of(error)]) from error
            cause = error.cause if isinstance(error.cause, Exception) else error
            is_told = isinstance(cause, WorkerLostError)  # whose loss it is
            failure = None if is_told else failure_in(str(cause), str(error))
            if failure is not None:  # perhaps of a peer that has died: then that is what to tell
                self._raise_if_lost(what, others)
                raise self._failed(what, rank, failure) from error
            if isinstance(cause, NemorlError):
                raise cause from None
            if isinstance(cause, RayError) and fate_of(cause) == "worker":  # its own helper, or the node of an argument
                raise self._lost(what, rank, cause) from error
            missing = _MISSING_MODULE.search(str(cause))
            if missing and find_spec(missing[1]) is not None:
                raise BackendError(
                    f"{rank.who} cannot import {missing[1]!r}, which this process can",
                    fix="install it as a package on every node, or put it beside the script that starts the run",
                ) from error
            # A rank whose peer has died fails with whatever its communication library says: find the peer.
            self._raise_if_lost(what, others)
            raise ForeignError(
                f"{rank.who} raised {type(cause).__name__} in {what}: {cause}",
                fix=f"the original traceback is below (--debug){rank.where_log}",
            ) from error

    def _raise_if_lost(self, what: str, others: Mapping[Any, Rank]) -> None:
        deadline = time.monotonic() + BLAME_S
        waiting = list(others)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            try:
                ray.get(ready[0])
            except RayError as error:
                if fate_of(error) == "worker":
                    raise self._lost(what, others[ready[0]], error) from error

    def _lost(self, what: str, rank: Rank, error: RayError) -> WorkerLostError:
        rank.is_lost = True
        why = f" ({in_words(error)})"
        if isinstance(error, RayActorError):  # of its own words only the last tell something, where its start failed
            why = f" ({str(error).splitlines()[-1]})" if START_FAILED in str(error) else ""
        failure = failure_in(rank.log_end)
        if failure is not None:  # torch ends the process of a rank whose collective timed out
            return self._failed(f"{what}, which ended it", rank, failure)
        return WorkerLostError(
            f"{rank.who} died during {what}{why}{rank.log_tail}",
            fix="if it was killed for memory, lower policy.microbatch_tokens or generation limits; "
            f"the run replaces lost workers up to cluster.max_restarts times{rank.where_log}",
        )

    def _failed(self, what: str, rank: Rank, failure: Failure) -> WorkerLostError:
        """``rank`` is lost for a failure that is not its code's."""
        rank.is_lost = True
        return failure.error(rank.who, what, rank.where_log)

    def _hung(self, what: str, ranks: Sequence[Rank]) -> WorkerHungError:
        for rank in ranks:
            rank.is_lost = True
        who = ", ".join(rank.who for rank in ranks)
        return WorkerHungError(
            f"the driver waited {self.timeout_s:.0f} s for {what} on {who}{ranks[0].log_tail}",
            fix="raise cluster.worker_timeout_s if the work takes that long; else look at the log for what it waits "
            f"for{ranks[0].where_log}",
        )

    def _stuck(self, what: str, ranks: Sequence[Rank], hang: Hang) -> WorkerHungError:
        for rank in ranks:
            rank.is_lost = True
        names = {rank.number: rank.who for rank in ranks}
        logs = {rank.number: rank.where_log for rank in ranks}
        return hang.error(what, names, logs[hang.missing[0]])
