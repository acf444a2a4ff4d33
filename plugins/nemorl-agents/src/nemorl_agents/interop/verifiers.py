"""verifiers: the tasks of a taskset as rows, their rewards as rewards. Speaks the ``v1`` API (0.4).

A trace of two messages stands for the episode: what was asked and what the policy said. So only tasks are taken whose
rewards need nothing else; verifiers itself would skip the others in silence, and every response would score 0.
"""

from __future__ import annotations

import inspect
from itertools import islice
from typing import TYPE_CHECKING, Any

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, PluginError, UsageError, boundary
from nemorl.types import Prompt, Row, Score

if TYPE_CHECKING:
    from nemorl_agents.interop.config import VerifiersTasksConfig

COLUMN = "verifiers_task"


class Verifiers(Environment):
    """The sum of a task's weighted rewards. Async, as they are."""

    name = "verifiers"

    def __init__(self, taskset: str, options: dict[str, Any]) -> None:
        self._taskset = taskset
        with boundary(f"verifiers taskset {taskset!r}"):
            self._config = load_taskset(taskset, options).config
            self._task_type = _loaders().task_type(taskset)
            self._data_type = self._task_type.data_type()

    async def score(self, prompt: Prompt, response: str) -> Score:  # type: ignore[override]
        given = prompt.row.get(COLUMN)
        if not isinstance(given, dict):
            raise DataError(
                f"prompt {prompt.text[:60]!r} holds no task of verifiers",
                fix=f"use `data: {{name: verifiers, taskset: {self._taskset}}}`",
            )
        task = self._task_type(self._data_type.model_validate(given), self._config.task)
        _require_offline(task)
        trace = _trace(task, response)
        await task.score(trace)
        components = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Score(float(trace.reward), components, metrics)


def rows(config: VerifiersTasksConfig) -> dict[str, list[Row]]:
    """The tasks, with their data as plain JSON for the environment."""
    with boundary(f"verifiers taskset {config.taskset!r}"):
        taskset = load_taskset(config.taskset, config.options)
        if config.max_rows is None and not taskset.bounded:
            raise UsageError(f"taskset {config.taskset!r} has no end", fix="set data.max_rows")
        tasks = list(islice(iter(taskset), config.max_rows))
    for task in tasks[:1]:
        _require_offline(task)
    made = [_row(task) for task in tasks]
    return {"validation": made[: config.num_validation], "train": made[config.num_validation :]}


def load_taskset(taskset: str, options: dict[str, Any]) -> Any:
    """A taskset by id.

    Raises:
        PluginError: it is not installed.
    """
    loaders = _loaders()
    try:
        config_type = loaders.taskset_config_type(taskset)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"verifiers taskset {taskset!r} is not installed ({error.name} cannot be imported)",
            fix="install its package, or correct `taskset`",
        ) from error
    return loaders.load_taskset(config_type.model_validate({**options, "id": taskset}))


def _loaders() -> Any:
    from verifiers.v1.utils import loaders

    return loaders


def _row(task: Any) -> Row:
    data = task.data
    turns: list[dict[str, str]] = []
    if data.system_prompt is not None:
        turns.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        turns.append({"role": "user", "content": data.prompt})
    else:
        turns += [{"role": message.role, "content": _text(message)} for message in data.prompt or []]
    if not turns:
        raise DataError(
            f"task {data.idx} of {type(task).__name__} has no prompt: it expects a user who speaks first",
            fix="use a taskset whose tasks begin with a prompt",
        )
    return {"prompt": turns, COLUMN: data.model_dump(mode="json")}


def _text(message: Any) -> str:
    from verifiers.v1.types import content_text

    return str(content_text(message.content))


def _require_offline(task: Any) -> None:
    """Refuse what this adapter cannot do justice to."""
    hooks = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    needs = [hook.__name__ for hook in hooks if _needs_runtime(hook)]
    toolsets = type(task).toolsets(task.config)
    reasons = {
        f"{', '.join(needs)} look into the task's container": bool(needs),
        "it runs in a container": task.NEEDS_CONTAINER,
        "it gives the policy tools": bool(toolsets),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UsageError(
            f"tasks of type {type(task).__name__} cannot be scored from a response alone: {'; '.join(found)}",
            fix="use a taskset whose rewards read the trace only",
        )


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _trace(task: Any, response: str) -> Any:
    """An episode of one turn, as verifiers records them."""
    import verifiers.v1 as vf
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    data = task.data
    messages: list[Any] = [] if data.system_prompt is None else [SystemMessage(content=data.system_prompt)]
    messages += [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    messages.append(AssistantMessage(content=response))
    last = len(messages) - 1
    nodes = [
        vf.MessageNode(parent=index - 1 if index else None, message=message, sampled=index == last)
        for index, message in enumerate(messages)
    ]
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )
