"""Launcher ``ssh``: machines that somebody else gave you, reached by ``ssh``; their folders are shared.

What to start, and the values of secrets, go over the standard input of ``ssh``: no argument and no file holds them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from nemorl.errors import ConfigIssue, ResourceError
from pydantic import Field

from nemorl_ops.launch import detached
from nemorl_ops.launch.attempts import CANCELLED, Attempt, Outcome
from nemorl_ops.launch.base import Job, Launch, LauncherConfig, Status
from nemorl_ops.launch.local import STATES, conclude_cancelled, next_attempt, tail, train_command

UNREACHABLE = 255
"""Exit code of ssh for its own failures."""


class SshConfig(LauncherConfig):
    """Machines reached by ``ssh``, without a scheduler.

    >>> SshConfig(hosts=["gpu1", "me@gpu2"]).hosts
    ('gpu1', 'me@gpu2')
    """

    summary: ClassVar[str] = "machines reached by ssh, which share folders"

    hosts: tuple[str, ...] = ()
    """As ``ssh`` takes them: names of ``~/.ssh/config`` or ``user@machine``. The first one leads."""
    ssh_options: tuple[str, ...] = ()
    """Further arguments of ``ssh``, e.g. ``-p2222`` or ``-oProxyJump=gate``."""
    connect_timeout_s: int = Field(20, ge=1)
    """Longest wait for a machine to answer."""
    cpus_per_node: int | None = Field(None, ge=1)
    """Cores that Ray may use on each. Unset: all."""
    interface: str | None = None
    """Network interface of Ray, e.g. ``ib0``. Unset: that of the default route."""
    object_store_gib: float | None = Field(None, gt=0)
    """Size of each node's object store. Unset: Ray's choice, 30 % of the memory."""
    join_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for all nodes to join Ray."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not self.hosts:
            yield ConfigIssue("hosts", "no machine given", "launch.hosts=[gpu1,gpu2]")
        for host in self.hosts:
            if host.startswith("-") or any(character.isspace() for character in host):
                yield ConfigIssue("hosts", f"{host!r} is no machine", "name or user@name")
        if self.template is not None:
            yield ConfigIssue("template", "there is nothing to render", "remove it")

    def check(self, job: Job) -> Iterator[ConfigIssue]:
        if self.hosts and job.num_nodes != len(self.hosts):
            message = f"{len(self.hosts)} machines for {job.num_nodes} nodes"
            yield ConfigIssue("hosts", message, f"launch.nodes={len(self.hosts)}, or other machines")

    def submission(self, job: Job) -> list[str]:
        """The command for the first machine; the others differ in rank and name."""
        return [*self._ssh(self.hosts[0]), "<", shlex.join(self._agent(job, 0, str(next_attempt(job))))]

    def submit(self, job: Job) -> dict[str, Any]:
        from nemorl_ops.launch.prepare import secret_values

        attempt = Attempt(next_attempt(job))
        attempt.folder.mkdir(parents=True)
        values = {**self.variables, **secret_values(self)}
        nodes: list[dict[str, Any]] = []
        try:
            for rank, host in enumerate(self.hosts):
                request = {
                    "verb": "start",
                    "command": self._agent(job, rank, str(attempt.folder)),
                    "log": str(attempt.folder / f"node-{rank}.log"),
                    "directory": str(job.working_directory),
                    "environment": values,
                }
                nodes.append({"host": host, **self._ask(host, request)})
        except ResourceError as error:
            self._kill(nodes)
            attempt.conclude(Outcome("failed", error.message))  # for those that could not be told
            raise
        return {"nodes": nodes}

    def recover(self, job: Job) -> dict[str, Any] | None:
        words = f"{job.folder}/attempt-"
        asked = [(host, self._ask(host, {"verb": "find", "words": words})) for host in dict.fromkeys(self.hosts)]
        nodes = [{"host": host, **found} for host, found in asked if found is not None]
        return {"nodes": nodes} if nodes else None

    def status(self, launch: Launch) -> Status:
        attempt = Attempt.latest(launch.job.folder)
        number = 0 if attempt is None else attempt.number
        if attempt is not None and attempt.outcome is not None:
            return Status(STATES[attempt.outcome.result], attempt.outcome.reason, number)
        for node in launch.handle["nodes"]:
            try:
                is_alive = self._ask(node["host"], {"verb": "alive", "handle": node})
            except ResourceError as error:
                return Status("unknown", error.message, number, self.hosts)
            if not is_alive:
                why = f"its process on {node['host']} is gone, and said nothing; launch it again to continue"
                return Status("failed", why, number, self.hosts)
        return Status("running", "", number, self.hosts)

    def cancel(self, launch: Launch, *, now: bool) -> None:
        attempt = Attempt.latest(launch.job.folder)
        if attempt is not None:
            attempt.request_stop(CANCELLED)
        if now:
            unreached = self._kill(launch.handle["nodes"])
            conclude_cancelled(launch.job)
            if unreached:
                raise ResourceError(
                    f"not ended at once: {'; '.join(unreached)}",
                    fix="the others are; what still runs there ends once it sees the folder of the launch",
                )

    def _kill(self, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """End the processes on these machines; returns why, of those where that failed."""
        failed = []
        for node in nodes:
            try:
                self._ask(node["host"], {"verb": "kill", "handle": node})
            except ResourceError as error:
                failed.append(error.message)
        return failed

    def logs(self, launch: Launch, *, follow: bool) -> list[str]:
        return tail(launch, follow=follow)

    def attach(self, launch: Launch, node: int) -> list[str]:
        enter = f'cd {shlex.quote(str(launch.job.working_directory))} && exec "$SHELL" -l'
        return ["ssh", "-t", *self.ssh_options, self.hosts[node], enter]

    def _agent(self, job: Job, rank: int, attempt: str) -> list[str]:
        python = self.python or sys.executable
        options: dict[str, object] = {
            "attempt": attempt,
            "rank": rank,
            "nodes": len(self.hosts),
            "name": self.hosts[rank],
            "cpus": self.cpus_per_node,
            "gpus": job.gpus_per_node,
            "interface": self.interface,
            "object-store-gib": self.object_store_gib,
            "join-s": self.join_timeout_s,
            "grace-s": self.grace_s,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        given += ["--plaintext"] if job.plaintext else []
        agent = [python, "-m", "nemorl_ops.launch.node", *given, "--", *train_command(python, job)]
        return ["bash", "-c", f'set -e\n{self.setup}\nexec "$@"', "bash", *agent] if self.setup else agent

    def _ssh(self, host: str) -> Sequence[str]:
        fixed = ("-T", "-oBatchMode=yes", f"-oConnectTimeout={self.connect_timeout_s}")
        remote = shlex.join([self.python or sys.executable, "-m", "nemorl_ops.launch.detached"])
        return ["ssh", *fixed, *self.ssh_options, host, remote]

    def _ask(self, host: str, request: dict[str, Any]) -> Any:
        """One request to a machine.

        Raises:
            ResourceError: it does not answer, or has no nemorl; with its words.
        """
        try:
            done = subprocess.run(
                self._ssh(host), input=json.dumps(request), capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ResourceError(f"ssh cannot be run: {error.strerror}", fix="install an SSH client") from error
        if done.returncode == 0:
            return json.loads(done.stdout.strip().splitlines()[-1])
        words = next(iter(done.stderr.strip().splitlines()[-1:]), f"code {done.returncode}")
        fix = f"check `ssh {host} true`: it must ask for no password"
        if done.returncode == detached.NOT_SHARED:
            fix = "launch from a folder on a file system that all machines share (--folder)"
        elif done.returncode != UNREACHABLE:
            fix = f"nemorl-ops must be installed there for {self.python or sys.executable} (launch.python)"
        raise ResourceError(f"{host}: {words}", fix=fix)
