"""Plays episodes of a classic environment of verifiers: a module with ``load_environment()``, as 0.1 and 0.2 run them.

Imported by ``verifiers_worker.py``, under the interpreter that has verifiers. It calls the policy's gateway directly.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL = "policy"


def is_classic(taskset: str) -> bool:
    """Its module speaks of ``load_environment``. Not imported, which only a verifiers of its time could do."""
    found = importlib.util.find_spec(module_of(taskset))
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return False
    return "load_environment" in Path(found.origin).read_text(encoding="utf-8")


def module_of(taskset: str) -> str:
    """The module of an id such as ``owner/my-env@1.0``."""
    return taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")


class ClassicPlayer:
    """One environment. The verbs are those of the other player, and so are its words."""

    def __init__(self, taskset: str, options: Mapping[str, Any]) -> None:
        """
        Args:
            taskset: Id of the environment.
            options: Arguments of its ``load_environment``.

        Raises:
            ValueError: It scores episodes of a group by each other.
        """
        import verifiers

        self._env = verifiers.load_environment(module_of(taskset), **options)
        if self._env.requires_group_rollouts:
            raise ValueError(f"{taskset} scores a group of episodes by each other; here each is scored by itself")

    async def tasks(self, limit: int | None) -> list[dict[str, Any]]:
        rows = self._env.get_dataset(n=-1 if limit is None else limit)
        return [{"prompt": _plain(row["prompt"]), "task": _plain(row)} for row in rows]

    async def run(self, task: Any, base_url: str, api_key: str) -> dict[str, Any]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        # Sampling is the run's, so that nothing is asked for here.
        async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=None) as client:
            output = await self._env.run_rollout(task, OpenAIChatCompletionsClient(client), MODEL, {})
        reward, error = output["reward"], output["error"]
        errors = [] if error is None else [str(error.get("error_chain_repr", error))[:2000]]
        turns = sum(_plain(message).get("role") == "assistant" for message in output["completion"] or [])
        seat = {
            "agent": "agent",
            "trainable": True,
            "is_policy": True,
            "rewards": {"reward": None if reward is None else [reward, reward]},
            "metrics": {name: value for name, value in (output["metrics"] or {}).items() if value is not None},
            "is_timeout": False,
            "stopped_by": output["stop_condition"],
            "errors": errors,
            "turns": turns,
        }
        return {"ok": error is None, "is_timeout": False, "errors": errors, "traces": [seat]}

    async def close(self) -> None:
        """Nothing of it stays open between episodes."""


def _plain(value: Any) -> Any:
    """As JSON, of messages that are objects too."""
    return json.loads(json.dumps(value, default=lambda other: other.model_dump(mode="json")))
