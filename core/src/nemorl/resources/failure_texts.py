"""Failures of communication and of devices, told by their text: torch raises both as plain ``RuntimeError``.

A rank whose peer is gone fails with what its communication library says. That is no error of whoever wrote the loss or
the model: the group is lost, and is replaced as if its process had died. Texts are those of torch 2.x
(``ProcessGroupNCCL.cpp``, ``NCCLUtils.cpp``, ``ProcessGroupGloo.cpp``, ``TCPStore``), of gloo's transports, of NCCL's
``ncclGetErrorString``, of ``cudaGetErrorString``, and of NVIDIA's driver in the kernel's log.

Errors of usage that speak of the same libraries (``ncclInvalidUsage``, tensors of other sizes, an illegal memory
access, a failed assertion on the device) are not among them: those come again after a restart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nemorl.errors import CollectiveError, DeviceLostError, WorkerLostError

Kind = Literal["collective", "device"]

_GLOO = r"gloo/(?:transport|rendezvous)/\S+\] .*?"
TEXTS: dict[Kind, tuple[str, ...]] = {
    "collective": (
        # NCCL, by torch's watchdog and by the calls themselves
        r"Watchdog caught collective operation timeout",
        r"NCCL communicator was aborted",
        r"NCCL watchdog thread terminated with exception",
        r"Some NCCL operations have failed or timed out",
        r"ncclSystemError",
        r"ncclRemoteError",
        r"ncclInternalError",  # a remote error may surface as one: https://github.com/NVIDIA/nccl/issues/795
        r"NCCL error: (?:unhandled system error|remote process exited or there was a network error)",
        # gloo
        _GLOO + r"Timed out waiting \d+ms for (?:send|recv) operation to complete",
        _GLOO + r"(?:Connection closed by peer|Connect timeout|Read (?:error|timeout)|Write (?:error|timeout))",
        r"Application timeout caused pair closure",  # whoever calls once more after a time-out
        r"Gloo connectFullMesh failed with",
        r"(?:failed to pass|timed out in) monitoredBarrier",
        # the store through which ranks meet
        r"Connection was likely closed\. Did the remote server shutdown or crash\?",
        r"Timed out after \d+ seconds waiting for clients",
        r"wait timeout after \d+ms",
        r"store->get\('[^']*'\) got error",
    ),
    "device": (
        r"uncorrectable ECC error encountered",
        r"uncorrectable NVLink error detected during the execution",
        r"Invalid access of peer GPU memory over nvlink or a hardware error",
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        r"no CUDA-capable device is detected",
        r"GPU is lost",
        r"GPU has fallen off the bus",
        r"NVRM: Xid \(PCI",
    ),
}
"""Regular expressions by what failed."""
_FOUND = {kind: re.compile("|".join(texts)) for kind, texts in TEXTS.items()}
_OPERATION = re.compile(r"OpType=(\w+)")
_FRAME = re.compile(r'File "[^"\n]*torch[/\\]distributed[/\\][^"\n]*", line \d+, in (\w+)')
_PASSING_ON = frozenset({"wrapper", "inner", "unwrap", "trigger_wait", "wait"})
"""Public functions of torch.distributed that are in every traceback, and name no operation."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the group or of its machine."""

    kind: Kind
    operation: str
    """The collective as torch calls it (``ALLREDUCE``, ``all_reduce``); empty where nothing names it"""
    text: str
    """The line that tells it"""

    def error(self, who: str, what: str, log: str = "") -> WorkerLostError:
        """The loss of the worker that failed.

        Args:
            who: The worker.
            what: It was asked to do.
            log: Where its log is, to end a sentence with.
        """
        if self.kind == "device":
            return DeviceLostError(
                f"the device of {who} failed in {what}: {self.text}",
                fix="have the node's GPUs checked (`nvidia-smi -q`, the kernel's log), and leave it out of the cluster "
                f"if it happens again{log}",
            )
        return CollectiveError(
            f"{self.operation or 'a collective operation'} failed on {who} in {what}: {self.text}",
            fix="look at the other ranks' logs: one is gone, hangs, or cannot reach the others; the run replaces lost "
            f"workers up to cluster.max_restarts times{log}",
        )


def failure_in(text: str, traceback: str = "") -> Failure | None:
    """The first failure of communication or of a device in a text.

    Args:
        text: A message, or lines of a log.
        traceback: Python's, which names the collective where the text does not.

    Example:
        >>> failure_in("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)")
        Failure(kind='collective', operation='ALLREDUCE', text='[Rank 1] Watchdog caught collective ...
        >>> failure_in("CUDA error: device-side assert triggered") is None
        True
    """
    for line in text.splitlines():
        for kind, pattern in _FOUND.items():
            if pattern.search(line):
                public = [name for name in _FRAME.findall(traceback) if name not in _PASSING_ON and name[0] != "_"]
                *_, operation = ["", *public, *_OPERATION.findall(line)[:1]]
                return Failure(kind, operation if kind == "collective" else "", line.strip())
    return None
