"""The program on each node of a job: ``python -m nemorl_ops.launch.node``.

Rank 0 starts Ray's head and the run, the others join; with one node there is no Ray to start. Rank 0 then watches: the
run, requests to stop, and the nodes. It says how the attempt ended, by a file that whoever started it reads.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nemorl.errors import DeadlineError, NemorlError, ResourceError

from nemorl_ops.launch import topology
from nemorl_ops.launch.attempts import CANCELLED, Attempt, Outcome
from nemorl_ops.launch.lives import Lives
from nemorl_ops.launch.ray_access import (
    authority_key,
    child_environment,
    make_access,
    makes_certificates,
    own_access,
)
from nemorl_ops.launch.ray_part import ClusterView, RayPart, own_address

POLL_S = 0.5
FILES_S = 20.0
"""How long a file of another node may take to appear: what network file systems remember of a missing one."""
NOTICE_S = 20.0
"""How long Ray may take to say that a node is gone, after the run has failed for want of it."""
FORCED_END_S = 20.0
"""Time for a run that lost a node: it can save nothing any more."""


@dataclass(frozen=True)
class Node:
    """One node's part in an attempt."""

    attempt: Attempt
    rank: int
    nodes: int
    name: str
    cpus: int | None
    gpus: int
    segment_size: int | None
    generation_nodes: int
    """The last so many nodes are for generation alone, and the others for training; 0: all are for both."""
    object_store_gib: float | None
    interface: str | None
    join_s: float
    grace_s: float
    plaintext: bool
    """Ray does without certificates."""
    lives: Lives | None
    """Of a job that is started again by itself."""
    command: tuple[str, ...]
    """Of the run, which gets ``cluster.address=…`` where there are several nodes."""

    def start_ray(self, head: str | None) -> RayPart:
        """This node's part of Ray, in the cluster of ``head``, or as the head."""
        address = self._address(head)
        log = self.attempt.folder / f"ray-{self.rank}.log"
        return RayPart(
            name=self.name,
            head=head,
            address=address,
            cpus=self.cpus,
            gpus=self.gpus,
            resources=topology.resources(
                self.rank, self.gpus, os.environ, topology.fabric_of_this_machine(), self.segment_size, self.role
            ),
            object_store_gib=self.object_store_gib,
            environment=child_environment(self._access(address)),
            log=log,
        )

    def _address(self, head: str | None) -> str:
        return own_address(head.rpartition(":")[0] if head is not None else None, self.interface)

    def _access(self, address: str) -> dict[str, str]:
        return own_access(self.attempt.folder, f"node-{self.rank}", address, plaintext=self.plaintext)

    @property
    def role(self) -> str | None:
        """The purpose of the node; ``None``: both training and generation."""
        if not self.generation_nodes:
            return None
        return "generation" if self.rank >= self.nodes - self.generation_nodes else "training"

    def lead(self) -> Outcome:
        """Rank 0: start the run, watch it to its end, and tell the other nodes."""
        with ExitStack() as stack:
            try:
                outcome = self._led(stack)
            except NemorlError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                outcome = Outcome("failed", error.message)
            self.attempt.conclude(outcome)  # before Ray's head goes, which the others would take for a loss
        return outcome

    def _led(self, stack: ExitStack) -> Outcome:
        if self.lives is not None:
            self.lives.begin()
        if self.nodes == 1:
            return self._watch(self._start_run([]), lambda: None)
        make_access(self.attempt.folder, plaintext=self.plaintext)
        part = self.start_ray(None)
        stack.callback(part.close)
        self.attempt.note("head", {"address": part.address, "node": self.name})
        view = self._connected(part)
        stack.callback(view.close)
        self._await_nodes(view, part)
        run = self._start_run([f"cluster.address={part.address}"])
        return self._watch(run, lambda: self._loss(view, part))

    def follow(self) -> None:
        """Other ranks: join, and stay until the attempt is over, or Ray on this node ends for want of its head."""
        missing = f"rank 0 has started no head of Ray within {self.join_s:.0f} s"
        head = wait_for(
            lambda: self.attempt.noted("head"), self.join_s, missing, fix="see ray-0.log and node-0.log beside this"
        )
        if makes_certificates(self.plaintext):
            key = authority_key(self.attempt.folder)
            wait_for(lambda: key.exists() or None, FILES_S, f"rank 0 made an authority, and {key} is not there")
        part = self.start_ray(str(head["address"]))
        try:
            while self.attempt.outcome is None:
                if part.exit_code is not None and self.attempt.outcome is None:
                    reason = f"Ray's processes on it ended with code {part.exit_code}, see ray-{self.rank}.log"
                    self.attempt.report_lost(self.rank, reason)
                    return
                time.sleep(POLL_S)
        finally:
            part.close()

    def _connected(self, part: RayPart) -> ClusterView:
        deadline = time.monotonic() + self.join_s
        shown = self._access(self._address(None))
        while True:
            try:
                return ClusterView(part.address, shown)
            except Exception as error:  # Ray raises plain ones while its head starts
                if part.exit_code is not None or time.monotonic() > deadline:
                    raise ResourceError(
                        f"Ray's head on node {self.name} does not answer at {part.address}: {error}",
                        fix="see ray-0.log",
                    ) from error
                time.sleep(POLL_S)

    def _await_nodes(self, view: ClusterView, part: RayPart) -> None:
        """Raises: DeadlineError, ResourceError, which name the nodes that are missing."""
        deadline = time.monotonic() + self.join_s
        while sum(view.nodes().values()) < self.nodes:
            loss = self._loss(view, part)
            if loss is not None:
                raise ResourceError(loss, fix="see the logs beside this file")
            if time.monotonic() > deadline:
                joined = {name for name, alive in view.nodes().items() if alive}
                names = [self.attempt.node_name(rank) for rank in range(self.nodes)]
                raise DeadlineError(
                    f"waited {self.join_s:.0f} s for {self.nodes} nodes, without: {', '.join(set(names) - joined)}",
                    fix="see their logs beside this file; raise launch.join_timeout_s where nodes start slowly",
                )
            if self.attempt.stop_reason is not None:
                raise ResourceError(f"stopped while nodes were joining: {self.attempt.stop_reason}")
            time.sleep(POLL_S)

    def _loss(self, view: ClusterView, part: RayPart) -> str | None:
        """Which node the attempt has lost, in words; ``None``: none."""
        for rank, reason in self.attempt.lost().items():
            return f"node {self.attempt.node_name(rank)} is lost: {reason}"
        if part.exit_code is not None:
            return f"node {self.name} is lost: Ray's head ended with code {part.exit_code}, see ray-0.log"
        gone = [name for name, alive in view.nodes().items() if not alive]
        return f"node {', '.join(gone)} is lost: it no longer answers Ray's head" if gone else None

    def _start_run(self, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
        joins_ray = bool(overrides)
        environment = child_environment(self._access(self._address(None))) if joins_ray else dict(os.environ)
        with (self.attempt.folder / "run.log").open("ab") as output:
            return subprocess.Popen(
                [*self.command, *overrides], stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def _watch(self, run: subprocess.Popen[bytes], loss: Callable[[], str | None]) -> Outcome:
        """Until the run has ended, was asked to, or has lost a node."""
        while run.poll() is None:
            reason = self.attempt.stop_reason
            if reason is not None:
                saved = _end(run, self.grace_s)
                if self.lives is not None:
                    self.lives.asked()
                result = "cancelled" if reason.startswith(CANCELLED) else "continue"
                return Outcome(result, reason if saved else f"{reason}; it did not save in time")  # type: ignore[arg-type]
            lost = loss()
            if lost is not None:
                _end(run, FORCED_END_S)
                return Outcome("continue", lost)
            time.sleep(POLL_S)
        if run.returncode == 0:
            return Outcome("finished")
        deadline = time.monotonic() + NOTICE_S
        while self.nodes > 1 and time.monotonic() < deadline:
            if (lost := loss()) is not None:
                return Outcome("continue", lost)
            time.sleep(POLL_S)
        return Outcome("failed", f"the run ended with code {run.returncode}, see run.log")


def wait_for(
    find: Callable[[], object], limit_s: float, otherwise: str, *, fix: str | None = None
) -> dict[str, object]:
    """The result of ``find`` once it is something.

    Raises:
        DeadlineError: ``otherwise``, after ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while (found := find()) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(otherwise, fix=fix)
        time.sleep(POLL_S)
    return found  # type: ignore[return-value]


def _end(run: subprocess.Popen[bytes], patience_s: float) -> bool:
    """Ask a run to save and stop; after ``patience_s`` it is killed. Whether it ended by itself, and well."""
    run.send_signal(signal.SIGTERM)
    try:
        return run.wait(patience_s) == 0
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Take part in an attempt; the exit code is 0 unless this node's part failed."""
    node = _read(arguments)
    if node.rank == 0:
        node.attempt.folder.mkdir(parents=True, exist_ok=True)

        def stop(number: int, _frame: object) -> None:
            node.attempt.request_stop(node.attempt.stop_reason or f"received {signal.Signals(number).name}")

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, stop)
    else:  # they stay while rank 0 saves
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    try:
        node.attempt.note(f"node-{node.rank}", {"name": node.name, "pid": os.getpid()})
        if node.rank > 0:
            node.follow()
            return 0
        outcome = node.lead()
    except NemorlError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        node.attempt.report_lost(node.rank, error.message)
        return 1
    print(f"{outcome.result} {outcome.reason}".strip(), flush=True)
    return int(outcome.result == "failed")


def _read(arguments: Sequence[str] | None) -> Node:
    parser = argparse.ArgumentParser(
        prog="python -m nemorl_ops.launch.node", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--attempt", type=Path, required=True, help="Folder of the attempt.")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--name", required=True, help="Of this node.")
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--segment-size", type=int)
    parser.add_argument("--generation-nodes", type=int, default=0)
    parser.add_argument("--object-store-gib", type=float)
    parser.add_argument("--interface")
    parser.add_argument("--join-s", type=float, default=600.0)
    parser.add_argument("--grace-s", type=float, default=120.0)
    parser.add_argument("--plaintext", action="store_true", help="Ray encrypts nothing.")
    parser.add_argument("--run-dir", type=Path, help="Of a run that is started again by itself: it has to get on.")
    parser.add_argument("--launch", default="", help="Names the submission.")
    parser.add_argument("command", nargs="+", help="Of the run, after --.")
    found = vars(parser.parse_args(arguments))
    run_dir, launch = found.pop("run_dir"), found.pop("launch")
    lives = Lives(run_dir, launch) if run_dir is not None else None
    return Node(**{**found, "attempt": Attempt(found["attempt"]), "command": tuple(found["command"]), "lives": lives})


if __name__ == "__main__":
    sys.exit(main())
