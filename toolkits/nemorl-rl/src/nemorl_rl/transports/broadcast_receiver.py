"""The receiving end of the transport ``nccl``: ask the trainer for a round, and take the buckets; if it fails, again.

A round can fail because another receiver of it died. That is not this one's affair: it asks again and goes on with the
bucket at which the round ended, for the trainer sends the same bytes. It gives up when it has received nothing for
``patience_s``, and at once when the trainer is gone.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import DeadlineError, WeightsLostError
from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from nemorl_rl.transports.broadcast import POLL_S, BroadcastPayload, Keys, has, me
from nemorl_rl.transports.layout import unpack
from nemorl_rl.transports.process_group import PrivateGroup, TransferError

if TYPE_CHECKING:
    from torch import Tensor

CONNECT_S = 10.0
"""Longest wait for the trainer's machine to accept a connection; a trainer that has ended refuses it at once."""


def receive(payload: BroadcastPayload) -> Iterator[Mapping[str, Tensor]]:
    """The buckets, in memory of this process, on its current device.

    Raises:
        WeightsLostError: the trainer is gone, or has published two newer versions.
        DeadlineError: nothing came for ``patience_s``.
    """
    number = 0  # of the bucket that comes next
    deadline = time.monotonic() + payload.patience_s
    while number < len(payload.buckets):
        try:
            with _seat(payload, deadline) as seat:
                for index, (size, slots) in enumerate(payload.buckets):
                    flat = seat.next_bucket(size)
                    if index == number:
                        yield unpack(flat, slots)
                        number += 1
                        deadline = time.monotonic() + payload.patience_s
                seat.taken()
        except TransferError as error:
            if time.monotonic() >= deadline:
                raise _late(payload, number, str(error)) from error


class _Seat:
    """A place in one round, from the moment the trainer has granted it."""

    def __init__(self, store: Any, number: int, rank: int, size: int, payload: BroadcastPayload) -> None:
        self._store, self._number, self._rank = store, number, rank
        is_cuda = payload.device_type == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        members = PrefixStore(Keys.group(number), store)
        self.group = PrivateGroup(members, rank, size, self._device, payload.deadline_s)

    def next_bucket(self, size: int) -> Tensor:
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.group.broadcast(flat, lambda: _why_void(self._store, self._number))
        self._store.add(Keys.taken(self._number, self._rank), 1)
        return flat

    def taken(self) -> None:
        """Everything is here."""
        self._store.set(Keys.taken_all(self._number, self._rank), "")


@contextmanager
def _seat(payload: BroadcastPayload, deadline: float) -> Iterator[_Seat]:
    store = _connect(payload)
    seat: _Seat | None = None
    is_complete = False
    try:
        ticket = store.add(Keys.tickets, 1)
        store.set(Keys.who(ticket), me())
        if not has(store, Keys.seat(ticket), deadline):
            raise TransferError("the trainer's thread did not answer")
        number, rank, size = json.loads(store.get(Keys.seat(ticket)))
        store.set(Keys.here(number, rank), "")
        _await_go(store, number, deadline)
        seat = _Seat(store, number, rank, size, payload)
        yield seat
        is_complete = True
    except DistError as error:  # of the store: its connection broke
        raise _lost(payload, error) from error
    finally:
        if seat is not None:
            seat.group.leave(is_complete=is_complete)


def _connect(payload: BroadcastPayload) -> Any:
    address = (payload.address, payload.port)
    try:
        # The store's own client would try again and again where nobody listens.
        socket.create_connection(address, timeout=CONNECT_S).close()
        return TCPStore(*address, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    except (OSError, DistError) as error:
        raise _lost(payload, error) from error


def _await_go(store: Any, number: int, deadline: float) -> None:
    while not store.check([Keys.go(number)]):
        if (reason := _why_void(store, number)) is not None:
            raise TransferError(reason)
        if time.monotonic() >= deadline:
            raise TransferError("the trainer did not begin the broadcast")
        time.sleep(POLL_S)


def _why_void(store: Any, number: int) -> str | None:
    """Why the trainer gave the round up, if it did."""
    key = Keys.void(number)
    return store.get(key).decode() if store.check([key]) else None


def _lost(payload: BroadcastPayload, error: Exception) -> WeightsLostError:
    return WeightsLostError(
        f"cannot reach the trainer's weights ({payload.trainer}) at {payload.address}:{payload.port}: {error}",
        fix="the trainer has ended or has published two newer versions; between nodes, open the ports among them",
    )


def _late(payload: BroadcastPayload, number: int, reason: str) -> DeadlineError:
    return DeadlineError(
        f"{me()} waited {payload.patience_s:g} s for bucket {number + 1} of {len(payload.buckets)} of the weights of "
        f"the trainer ({payload.trainer} at {payload.address}:{payload.port}): {reason}",
        fix="look at the trainer's log for what it waits for",
    )
