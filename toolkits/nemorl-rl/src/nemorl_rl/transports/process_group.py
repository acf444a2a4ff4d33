"""A process group of ``torch.distributed`` for one broadcast, apart from those of the trainer and of the engine.

It is made from its classes, not by ``init_process_group`` or ``new_group``: it has no name, is in no registry, and the
default group of the process, if there is one, knows nothing of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POLL_S = 0.0005
"""How often a transfer is asked whether it is through: short against the milliseconds that a bucket takes."""
VOID_POLL_S = 0.1
"""How often it is asked whether the transfer was given up: a question to another process."""
ABANDONED_POLL_S = 0.1
"""How often an operation that was given up is asked whether it has noticed."""


class TransferError(Exception):
    """A transfer that ended without all of its bytes; says why. For the two ends of a broadcast only."""


class PrivateGroup:
    """Ranks that share a store: rank 0 sends. The backend is that of the device, NCCL or gloo."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, deadline_s: float) -> None:
        """Meet the others.

        Raises:
            TransferError: somebody did not come in time.
        """
        self._deadline_s = deadline_s
        self._group: Any
        self._pending: Any = None
        """The last operation and its memory."""
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
                options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined,unused-ignore]
                # NCCL's watchdog ends the whole process when an operation is late. It must not come first.
                options._timeout = timedelta(seconds=4 * deadline_s)
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[attr-defined,unused-ignore]
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=deadline_s))
        except RuntimeError as error:
            raise TransferError(f"the group of {size} was not formed: {_first_line(error)}") from error

    def broadcast(self, flat: Tensor, why_void: Callable[[], str | None] = lambda: None) -> None:
        """Bytes from rank 0 to all.

        Args:
            flat: Sent on rank 0, filled elsewhere.
            why_void: Why the transfer was given up elsewhere, if it was; asked now and then.

        Raises:
            TransferError: it did not end in time, was given up, or a rank is gone.
        """
        start = asked = time.monotonic()
        try:
            work = self._group.broadcast(flat, 0)
            self._pending = work, flat
            while not work.is_completed():
                now = time.monotonic()
                if now - start > self._deadline_s:
                    raise TransferError(f"{flat.numel()} bytes took more than {self._deadline_s:g} s")
                if now - asked > VOID_POLL_S:
                    asked = now
                    if (reason := why_void()) is not None:
                        raise TransferError(reason)
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            raise TransferError(_first_line(error)) from error
        if flat.is_cuda:
            # ``wait`` only orders streams, and the memory may be read or freed in another.
            torch.cuda.current_stream(flat.device).synchronize()

    def leave(self, *, is_complete: bool) -> None:
        """End the group: in order after a complete transfer, else at once, waiting for nobody."""
        if is_complete:
            self._group.shutdown()
            return
        self._group.abort()
        # Whoever drops the last reference waits until the operation has noticed, with the interpreter locked.
        group, pending = self._group, self._pending
        self._group = self._pending = None
        if pending is not None:
            threading.Thread(target=_outlive, args=(group, *pending), name="nemorl-abandoned", daemon=True).start()


def _outlive(group: Any, work: Any, flat: Tensor) -> None:
    """Keep a group and the memory of its operation until that has ended; gloo and NCCL have a deadline for it."""
    while not work.is_completed():
        time.sleep(ABANDONED_POLL_S)
    del group, work, flat


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
