"""Environments of verifiers, played as verifiers plays them: harness, tools, users, sub-agents.

They run in a process of their own, under an interpreter that need not be nemorl's, and call the policy over HTTP by its
gateway. Their rewards are the episode's, or each seat's where the policy plays several.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError, DataError, UsageError
from nemorl.types import Prompt, Row, Score
from nemorl_rl.agents.gateways import Access
from nemorl_rl.agents.seats import seat_scores
from nemorl_rl.agents.watched import WatchedPolicy
from nemorl_trust import front_door
from packaging.version import InvalidVersion, Version

from nemorl_agents.interop.played import Played, PlayedEpisodes, usable
from nemorl_agents.interop.processes import WorkerProcess, script

if TYPE_CHECKING:
    from nemorl_agents.interop.episodes_config import VerifiersEnvConfig, VerifiersEnvTasksConfig, VerifiersOptions

COLUMN = "verifiers_task"
SUPPORTED = ((0, 1), (0, 2), (0, 4))
"""Versions of verifiers: the first two for classic environments, the last with the v1 API that the worker speaks."""
LOAD_S = 300.0
"""For a taskset to be imported and its tasks to be read."""
FIX = "see that its harness runs by hand (`eval TASKSET`); a seat with a client of its own does not call the policy"


class VerifiersEnv(PlayedEpisodes):
    """Episodes of one environment of verifiers."""

    name = "verifiers_env"

    def __init__(self, config: VerifiersEnvConfig) -> None:
        super().__init__(config, fix=FIX, untrained=config.seats)
        self._config = config
        self._worker: WorkerProcess | None = None

    def begin(self) -> None:
        if self._worker is None:
            self._worker = loaded(self._config)

    async def play(self, prompt: Prompt, policy: WatchedPolicy, access: Access) -> Played:
        task = prompt.row.get(COLUMN)
        if not isinstance(task, Mapping):
            raise DataError(
                f"prompt {prompt.text[:60]!r} holds no task of verifiers",
                fix=f"use `data: {{name: verifiers_env, taskset: {self._config.taskset}}}`",
            )
        worker = self._worker
        assert worker is not None  # begin came before
        told = await worker.ask("run", task=task, base_url=access.base_url, api_key=access.api_key)
        return played(told, self._config.taskset, self._untrained)

    def end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def loaded(config: VerifiersOptions) -> WorkerProcess:
    """A process that has loaded the environment.

    Raises:
        UsageError: It cannot: verifiers or the taskset is missing, another version, wrong options.
    """
    python = str(config.python.expanduser() if config.python is not None else sys.executable)
    what = f"verifiers environment {config.taskset!r}"
    # Programs of its environment, such as uv, which the harnesses of verifiers want.
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    command = [python, script("verifiers_worker.py"), front_door.__file__]
    worker = WorkerProcess(command, what, variables={"PATH": path, **config.variables})
    try:
        version = worker.ask_now("load", within_s=LOAD_S, config=env_config(config))
    except (BackendError, UsageError) as error:
        worker.close()
        raise UsageError(
            f"{what} cannot be loaded by {python}: {error.message}",
            fix='correct its options, set `python`, or pip install "verifiers>=0.4,<0.5" and the taskset for that one',
        ) from error
    if not is_supported(version):
        worker.close()
        raise UsageError(
            f"{python} has verifiers {version}, whose API differs", fix='pip install "verifiers>=0.4,<0.5" for it'
        )
    return worker


def is_supported(version: str) -> bool:
    """The worker speaks its API; a release candidate has that of its release.

    >>> [is_supported(version) for version in ("0.4rc1", "0.4.0.dev3", "0.1.14", "0.3.1", "1.4", "unknown")]
    [True, True, True, False, False, False]
    """
    try:
        return (*Version(version).release, 0)[:2] in SUPPORTED
    except InvalidVersion:
        return False


def env_config(config: VerifiersOptions) -> dict[str, Any]:
    """The `[env]` block of verifiers."""
    return {**config.env, "taskset": {**config.options, "id": config.taskset}}


def rows(config: VerifiersEnvTasksConfig) -> dict[str, Sequence[Row]]:
    """The tasks, with their data as plain JSON for the environment."""
    worker = loaded(config)
    try:
        tasks = worker.ask_now("tasks", within_s=LOAD_S, limit=config.max_rows)
    finally:
        worker.close()
    made: list[Row] = [{"prompt": task["prompt"], COLUMN: task["task"]} for task in tasks]
    return {"validation": made[: config.num_validation], "train": made[config.num_validation :]}


def played(told: Mapping[str, Any], taskset: str, untrained: Collection[str] = ()) -> Played:
    """An episode of verifiers as nemorl sees it: a score of each seat that the policy plays, and their mean.

    Args:
        told: By the worker.
        taskset: For errors.
        untrained: Roles that the policy plays and learns nothing from.

    Raises:
        UsageError: The policy plays a seat that verifiers has not trained, and the config does not say so.
    """
    traces: Sequence[Mapping[str, Any]] = told["traces"]
    for trace in traces:
        if trace["is_policy"] and not trace["trainable"] and trace["agent"] not in untrained:
            raise UsageError(
                f"seat {trace['agent']!r} of {taskset!r} is not to be trained, and the policy plays it",
                fix=f"say so, environment.seats: {{{trace['agent']}: untrained}}, or give it a model of its own: "
                f"environment.env.{trace['agent']}.client and .model",
            )
    seats = [trace for trace in traces if trace["is_policy"] and trace["agent"] not in untrained]
    metrics = {"turns": fmean(trace["turns"] for trace in seats) if seats else 0.0}
    is_timeout = bool(told["is_timeout"] or any(trace["is_timeout"] for trace in traces))
    errors = [*told["errors"], *(error for trace in traces for error in trace["errors"])]
    if not told["ok"] and not is_timeout:
        return Played(problem=errors[-1] if errors else "verifiers says that it failed, and not why", metrics=metrics)
    is_shared = sum(trace["is_policy"] for trace in traces) > 1
    score, problem = _score(seats, is_shared=is_shared)
    return Played(score, problem or (errors[-1] if errors else ""), is_timeout, metrics)


def _score(seats: Sequence[Mapping[str, Any]], *, is_shared: bool) -> tuple[Score | None, str]:
    """Of the episode. With ``is_shared`` the policy plays more than one seat, and each has its own."""
    found: dict[str, Score] = {}
    for seat in seats:
        if not seat["rewards"] or None in seat["rewards"].values():
            continue
        total = sum(weighted for _, weighted in seat["rewards"].values())
        reward, problem = usable(total, "the reward of verifiers")
        if reward is None:
            return None, problem
        components = {name: float(raw) for name, (raw, _) in seat["rewards"].items()}
        found[seat.get("seat", seat["agent"])] = Score(reward, _finite(components), _finite(seat["metrics"]))
    if not found:
        return None, "verifiers gave no reward"
    return seat_scores(found) if is_shared else next(iter(found.values())), ""


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """Those that are finite numbers."""
    found = {name: usable(float(value), name)[0] for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}
