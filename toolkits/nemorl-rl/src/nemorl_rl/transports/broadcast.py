"""The transport ``nccl``: the trainer broadcasts buckets to whoever asks, device to device, on any nodes.

``publish`` copies the weights within the trainer's device and returns where to ask for them. A thread then serves:
those who ask at about the same time (replicas, the processes of a tensor-parallel engine) form a round, get a process
group of their own, and receive every bucket by one broadcast. Receivers are not counted in advance: one who asks later,
a replaced generator for instance, gets a round later.

Who waits for whom: the trainer's thread, in a round, for those who asked to be in it, ``deadline_s`` at each point; a
receiver for the trainer, three times as long. A receiver that is late or dies ends the round; the trainer's log names
it, and the others ask again (``broadcast_receiver``). The training thread waits for nobody. The backend is that of the
tensors' device: NCCL for GPUs; for tensors on the CPU, gloo runs the very same code.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nemorl.errors import DeadlineError
from nemorl.weights import Export

from nemorl_rl.transports.layout import Slots, pack

if TYPE_CHECKING:
    from torch import Tensor

KEPT_VERSIONS = 2
"""The newest and the one before, which may still be on its way to somebody."""
GATHER_S = 0.02
"""How long a round stays open after each arrival: the processes of one engine ask within milliseconds."""
POLL_S, IDLE_S = 0.002, 0.05
"""How often the store is asked for an entry, while one is expected and while nobody has asked for long. Its own way to
wait writes two warnings to the log whenever it waits in vain."""
CLOSE_S = 5.0
"""Longest wait for a round in progress when the transport closes."""


@dataclass(frozen=True, slots=True)
class BroadcastPayload:
    """Where to ask for one version, and what comes."""

    address: str
    port: int
    """Of the ``torch.distributed.TCPStore`` in the trainer's process through which both sides arrange a round."""
    trainer: str
    """The sender's name, for messages."""
    device_type: str
    """``cuda`` or ``cpu``: of the buffers on both sides."""
    buckets: tuple[tuple[int, Slots], ...]
    """Bytes of each bucket, and where its tensors lie."""
    deadline_s: float
    """How long the trainer waits for a receiver, and either for one bucket of a round."""

    @property
    def patience_s(self) -> float:
        """How long a receiver waits for any progress. The trainer may meanwhile wait in vain for another receiver, at
        the start of a round or at its end."""
        return 3 * self.deadline_s


class Keys:
    """Entries of the store. Tickets count receivers, rounds count broadcasts; both begin at 1."""

    tickets = "tickets"
    """How many tickets were drawn."""

    @staticmethod
    def who(ticket: int) -> str:
        """Set by a receiver: who it is."""
        return f"who/{ticket}"

    @staticmethod
    def seat(ticket: int) -> str:
        """Set by the trainer: round, rank and size, as JSON."""
        return f"seat/{ticket}"

    @staticmethod
    def here(number: int, rank: int) -> str:
        """Set by a receiver: it knows its seat and will join the round's group."""
        return f"here/{number}/{rank}"

    @staticmethod
    def go(number: int) -> str:
        """Set by the trainer: all are here."""
        return f"go/{number}"

    @staticmethod
    def void(number: int) -> str:
        """Set by the trainer: why the round was given up."""
        return f"void/{number}"

    @staticmethod
    def taken_all(number: int, rank: int) -> str:
        """Set by a receiver: it has every bucket."""
        return f"taken_all/{number}/{rank}"

    @staticmethod
    def taken(number: int, rank: int) -> str:
        """Set by a receiver: how many buckets it has."""
        return f"taken/{number}/{rank}"

    @staticmethod
    def group(number: int) -> str:
        """Prefix under which the round's process group meets."""
        return f"group/{number}"


class Broadcast:
    """Either end (see ``WeightTransport``)."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._offers: deque[_Offer] = deque()
        self._published = 0
        self.failures: deque[DeadlineError] = deque(maxlen=10)
        """The last rounds that were given up, each naming who did not come or take the weights."""

    def publish(self, export: Export) -> BroadcastPayload:
        import torch

        while len(self._offers) >= KEPT_VERSIONS:
            self._offers.popleft().stop()  # first of all: its memory is needed
        packed = [pack(bucket) for bucket in export() if bucket]
        for device in {flat.device for flat, _ in packed if flat.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the thread below reads in a stream of its own
        self._published += 1
        name = f"nemorl-broadcast-{self._published}"
        self._offers.append(_Offer(name, [flat for flat, _ in packed], self._deadline_s, self._report))
        return self._offers[-1].payload([slots for _, slots in packed])

    def fetch(self, payload: BroadcastPayload) -> Iterator[Mapping[str, Tensor]]:
        from nemorl_rl.transports.broadcast_receiver import receive

        return receive(payload)

    def close(self) -> None:
        for offer in self._offers:
            offer.stop()
        for offer in self._offers:
            offer.join()
        self._offers.clear()

    def _report(self, error: DeadlineError) -> None:
        self.failures.append(error)
        print(f"nemorl: {error}", file=sys.stderr, flush=True)  # the worker's log


class _Offer:
    """One version, and the thread that serves it until it is stopped."""

    def __init__(
        self, name: str, flats: Sequence[Tensor], deadline_s: float, report: Callable[[DeadlineError], None]
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._flats, self._deadline_s, self._report = flats, deadline_s, report
        self._address = own_address()
        self._store = TCPStore(
            self._address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
        )
        self._port = self._store.port
        self._stopped = threading.Event()
        self._ticket = 1  # the next to be drawn
        self._round = 0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def payload(self, slots: Sequence[Slots]) -> BroadcastPayload:
        sizes = [flat.numel() for flat in self._flats]
        device_type = self._flats[0].device.type if self._flats else "cpu"
        buckets = tuple(zip(sizes, slots, strict=True))
        return BroadcastPayload(self._address, self._port, me(), device_type, buckets, self._deadline_s)

    def stop(self) -> None:
        """End after the round in progress, if there is one."""
        self._stopped.set()

    def join(self) -> None:
        self._thread.join(CLOSE_S)

    # In the thread

    def _serve(self) -> None:
        idle_since = time.monotonic()
        while not self._stopped.wait(POLL_S if time.monotonic() - idle_since < 1.0 else IDLE_S):
            receivers: list[int] = []
            while self._has(Keys.who(self._ticket), GATHER_S if receivers else 0.0):
                receivers.append(self._ticket)
                self._ticket += 1
            if receivers:
                self._serve_round(receivers)
                idle_since = time.monotonic()
            else:
                self._skip_if_lost()
        del self._store  # with it the port: whoever asks later is refused, not kept waiting

    def _serve_round(self, tickets: Sequence[int]) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from nemorl_rl.transports.process_group import PrivateGroup, TransferError

        self._round += 1
        number, size = self._round, len(tickets) + 1
        names = {rank: self._store.get(Keys.who(ticket)).decode() for rank, ticket in enumerate(tickets, 1)}
        for rank, ticket in enumerate(tickets, 1):
            self._store.set(Keys.seat(ticket), json.dumps([number, rank, size]))
        group: PrivateGroup | None = None
        is_complete = False
        try:
            # NCCL has no deadline for those who form a group: all must be there before it is formed.
            self._await({Keys.here(number, rank): name for rank, name in names.items()}, "join the broadcast")
            self._store.set(Keys.go(number), "")
            store = PrefixStore(Keys.group(number), self._store)
            group = PrivateGroup(store, 0, size, self._flats[0].device, self._deadline_s)
            for flat in self._flats:
                group.broadcast(flat)
            self._await({Keys.taken_all(number, rank): name for rank, name in names.items()}, "take the weights")
            is_complete = True
        except TransferError as error:
            self._give_up(number, self._late(self._slowest(number, names), f"take the weights ({error})"))
        except DeadlineError as error:
            self._give_up(number, error)
        finally:
            if group is not None:
                group.leave(is_complete=is_complete)

    def _await(self, names: Mapping[str, str], what: str) -> None:
        """Until each of these keys is there; their values are who sets them."""
        deadline = time.monotonic() + self._deadline_s
        missing = [name for key, name in names.items() if not self._has(key, deadline - time.monotonic())]
        if missing:
            raise self._late(missing, what)

    def _slowest(self, number: int, names: Mapping[int, str]) -> list[str]:
        """The receivers that have the fewest buckets of a round."""
        counts = {rank: self._store.add(Keys.taken(number, rank), 0) for rank in names}
        return [name for rank, name in names.items() if counts[rank] == min(counts.values())]

    def _give_up(self, number: int, error: DeadlineError) -> None:
        self._store.set(Keys.void(number), error.message)
        self._report(error)

    def _late(self, names: Sequence[str], what: str) -> DeadlineError:
        return DeadlineError(
            f"the trainer ({me()}) waited up to {self._deadline_s:g} s for {' or '.join(names)} to {what}",
            fix="look at that process's log: it died or hangs; the other generators ask again by themselves",
        )

    def _has(self, key: str, patience_s: float) -> bool:
        return has(self._store, key, time.monotonic() + patience_s)

    def _skip_if_lost(self) -> None:
        """A receiver may have died between drawing its ticket and saying who it is."""
        if self._store.add(Keys.tickets, 0) < self._ticket or self._has(Keys.who(self._ticket), self._deadline_s):
            return
        self._report(self._late([f"receiver {self._ticket}"], "say who it is"))
        self._ticket += 1


def has(store: Any, key: str, deadline: float) -> bool:
    """Whether the store has an entry by a moment of ``time.monotonic()``."""
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def me() -> str:
    """This process, for messages on other machines."""
    import socket

    return f"process {os.getpid()} on {socket.gethostname()}"


def own_address() -> str:
    """Where other nodes of the cluster reach this one."""
    ray = sys.modules.get("ray")  # where it was not imported, which takes a second or fails, it does not run
    if ray is None or not ray.is_initialized():
        return "127.0.0.1"
    address: str = ray.util.get_node_ip_address()
    return address
