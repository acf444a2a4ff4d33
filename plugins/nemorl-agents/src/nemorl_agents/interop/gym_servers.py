"""NeMo-Gym's servers: where its agents are, and starting all of them in a process of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
from nemorl.errors import BackendError, UsageError
from nemorl_rl.serving.http_clients import read_json

from nemorl_agents.interop.processes import reading, script

if TYPE_CHECKING:
    from nemorl_agents.interop.episodes_config import StartGymConfig

LOOK_S, POLL_S = 10.0, 0.5
ENDING_S = 30.0
"""Longer than the keeper needs."""
LOG_LINES = 30
"""Of what Gym wrote, shown where it does not start."""
AGENTS = "responses_api_agents"


def agents_at(head_url: str) -> dict[str, str]:
    """The addresses of Gym's agent servers by name, as its head server tells them.

    Raises:
        UsageError: Nobody is there, or it is another program.
    """
    try:
        told = read_json(f"{head_url.rstrip('/')}/server_instances", timeout_s=LOOK_S)
        found = {one["process_name"]: one["url"] for one in told if one["server_type"] == AGENTS}
    except httpx2.HTTPError as error:
        raise UsageError(
            f"NeMo-Gym's head server at {head_url} does not answer: {error}",
            fix="start Gym first (`ng_run`, or environment.start), or give environment.agents",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{head_url} answers, and not as NeMo-Gym's head server does ({type(error).__name__}: {error})",
            fix="correct environment.head_url; Gym 0.2 and newer are understood",
        ) from error
    if not found:
        raise UsageError(
            f"NeMo-Gym at {head_url} runs no agent server", fix="add a config with one to its config_paths"
        )
    return found


class GymServers:
    """Gym's own ``ng_run``, ready when this exists."""

    def __init__(self, config: StartGymConfig, policy_base_url: str, model: str) -> None:
        """
        Args:
            config: What to start.
            policy_base_url: Where Gym's model server calls the policy.
            model: The name by which it does.

        Raises:
            UsageError: It cannot be started.
            BackendError: It ended, or was not ready in time.
        """
        port = _free_port()
        self.head_url = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-I", "-S", script("keeper.py")),
            *(str(Path(config.command[0]).expanduser()), *config.command[1:]),
            f"+config_paths=[{','.join(config.config_paths)}]",
            f"+policy_base_url={policy_base_url}",
            "+policy_api_key=unused",
            f"+policy_model_name={model}",
            f"+head_server={{host:127.0.0.1,port:{port}}}",
            *([f"+ray_head_node_address={_ray_with_gpus(config.gpu_nodes)}"] if config.gpu_nodes else []),
            *config.overrides,
        ]
        try:
            self._process = subprocess.Popen(
                command, cwd=config.folder and config.folder.expanduser(),
                env={**os.environ, **config.variables}, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"NeMo-Gym cannot be started: {error}", fix="correct environment.start.command and folder"
            ) from error
        self._tail: deque[str] = deque(maxlen=LOG_LINES)
        self._log = reading(self._process.stdout, self._tail.append)
        try:
            self._wait(config.ready_s)
        except BaseException:
            self.close()
            raise

    def require_alive(self) -> None:
        """
        Raises:
            BackendError: It has ended.
        """
        if self._process.poll() is not None:
            what = f"NeMo-Gym has ended (exit code {self._process.returncode})"
            raise BackendError(f"{what}; it wrote:\n{self._said()}", fix="mend what it says")

    def close(self) -> None:
        """End it as Ctrl-C would, then what is left. Twice is harmless."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        self._process.kill()
        self._process.wait()

    def _wait(self, ready_s: float) -> None:
        end = time.monotonic() + ready_s
        while not self._is_ready():
            self.require_alive()
            if time.monotonic() > end:
                raise BackendError(
                    f"NeMo-Gym is not ready after {ready_s:.0f} s; it wrote:\n{self._said()}",
                    fix="raise environment.start.ready_s: it makes a virtual environment for each server first",
                )
            time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        try:
            instances = read_json(f"{self.head_url}/server_instances", timeout_s=LOOK_S)
            return bool(instances) and all(_answers(one["url"]) for one in instances)
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):  # it says something else until it is ready
            return False

    def _said(self) -> str:
        self._log.join(0 if self._process.poll() is None else 1.0)
        return "\n".join(self._tail)


def _answers(url: str) -> bool:
    """Somebody listens, whatever they say."""
    try:
        read_json(url, timeout_s=LOOK_S)
    except httpx2.TransportError:
        return False
    except (httpx2.HTTPError, ValueError):
        pass
    return True


def _ray_with_gpus(nodes: int) -> str:
    """The address of the run's Ray cluster, where some nodes have GPUs that the run leaves.

    Raises:
        UsageError: The run has no such cluster.
    """
    import ray
    from ray._private.state import available_resources_per_node

    fix = "start Ray on so many nodes more than cluster.num_nodes, and set cluster.address"
    if not ray.is_initialized():
        raise UsageError(f"NeMo-Gym is to serve models on {nodes} node(s), and the run uses no Ray cluster", fix=fix)
    free = [found.get("GPU", 0) for found in available_resources_per_node().values()]
    if sum(gpus >= 1 for gpus in free) < nodes:
        what = f"NeMo-Gym is to serve models on {nodes} node(s); {sum(gpus >= 1 for gpus in free)} have a free GPU"
        raise UsageError(what, fix=fix)
    address: str = ray.get_runtime_context().gcs_address
    return address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
