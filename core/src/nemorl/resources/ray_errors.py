"""Errors of Ray itself, which knows nothing of runs, in words for whoever has one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from nemorl.errors import ResourceError, WorkerLostError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Variables that Ray reads."""

Fate = Literal["worker", "machine", "cluster", "environment", "call"]
"""Subject of an error of Ray, and so its remedy: another worker, room on a machine, another cluster, another
``runtime_env``, or nothing, since the call itself failed."""
FATES: Mapping[Fate, frozenset[str]] = {
    "worker": frozenset({
        "RayActorError", "ActorDiedError", "ActorUnavailableError", "OutOfMemoryError", "WorkerCrashedError",
        "NodeDiedError", "LocalRayletDiedError", "ActorUnschedulableError", "ActorPlacementGroupRemoved",
        "TaskUnschedulableError", "TaskPlacementGroupRemoved", "GetTimeoutError",
        # What was sent to it, or came from it, was held by a node that is gone.
        "ObjectLostError", "ObjectFetchTimedOutError", "ObjectFreedError", "ObjectReconstructionFailedError",
        "OwnerDiedError", "ReferenceCountingAssertionError", "PlasmaObjectNotAvailable",
    }),
    "machine": frozenset({"OutOfDiskError", "ObjectStoreFullError"}),
    "cluster": frozenset({"RpcError", "AuthenticationError"}),
    "environment": frozenset({"RuntimeEnvSetupError"}),
    "call": frozenset({
        "RayTaskError", "UserCodeException", "UnserializableException", "CrossLanguageError", "TaskCancelledError",
        "PendingCallsLimitExceeded", "AsyncioActorExit", "ActorAlreadyExistsError", "ActorHandleNotFoundError",
        "ObjectRefStreamEndOfStreamError", "OufOfBandObjectRefSerializationException", "RayChannelError",
        "RayChannelTimeoutError", "RayCgraphCapacityExceeded", "RayDirectTransportError",
        "StreamingGeneratorReplayInconsistentError",
        "RaySystemError",  # mostly a value that one side cannot read
    }),
}  # fmt: skip
"""Ray's exceptions by name: a newer Ray may have others, which are what they derive from."""
FIXES: Mapping[Fate, str] = {
    "machine": "make room on the node's disk (RAY_TMPDIR names another one), or shorten what a step holds",
    "cluster": "start the cluster again if it is not back; the same command then continues from the last checkpoint",
    "environment": "correct cluster.runtime_env: the node's logs of Ray say what could not be installed",
    "call": "the original traceback is below (--debug)",
}
ASK_WITHOUT_TOKEN = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_get(b"session_name", b"session")
"""
LONGEST_ASK_S = 30
"""For a process that imports Ray and asks one question."""


def fate_of(error: BaseException) -> Fate:
    """The subject of an error of Ray.

    Args:
        error: A ``ray.exceptions.RayError``.
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((fate for name in names for fate, known in FATES.items() if name in known), "call")


def in_words(error: BaseException) -> str:
    """An error of Ray's on one line: its class, and how it begins."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


@contextmanager
def token_of_the_driver_alone_named() -> Iterator[None]:
    """Turn the loss of a worker at its start into its cause, where the driver wants a token that the cluster has not.

    Ray lets such a driver connect. Then its GCS cannot ask the driver about the worker, and drops it.

    Raises:
        ResourceError: This process uses a token, and the cluster answers without one.
    """
    import ray

    try:
        yield
    except WorkerLostError as error:
        if os.environ.get(MODE) != "token" or not ray.is_initialized():
            raise
        address: str = ray.get_runtime_context().gcs_address
        if not _answers_without_token(address):
            raise
        raise ResourceError(
            f"no worker starts: this process wants a token of who speaks to it, and the Ray cluster at {address} has "
            "none",
            fix="start the cluster with RAY_AUTH_MODE=token and the same token; or, where its network can be trusted, "
            f"set cluster.security.token_auth: false and unset {MODE}",
        ) from error


def _answers_without_token(address: str) -> bool:
    """Asked by a process of its own: in this one all of Ray would be without a token meanwhile."""
    shown = {name: value for name, value in os.environ.items() if name not in (TOKEN, TOKEN_PATH)}
    command = [sys.executable, "-c", ASK_WITHOUT_TOKEN, address]
    try:
        done = subprocess.run(
            command, env={**shown, MODE: "disabled"}, capture_output=True, timeout=LONGEST_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
