"""Parts registered when this module is imported, as a user's own module would: for ``test_registration``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.config.models import PolicyConfig
from nemorl.contracts.environment import Environment
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt


def shouting(prompt: str, response: str) -> float:
    """Reward 1 for capitals."""
    return float(response.isupper())


class Bonus(Environment):
    """Rewards with a bonus."""

    def __init__(self, bonus: float, word: str = "1") -> None:
        self.bonus, self.word = bonus, word

    def score(self, prompt: Prompt, response: str) -> float:
        return self.bonus * (self.word in response)


def squares(count: int = 3) -> list[dict[str, str]]:
    """Squares of small numbers."""
    return [{"prompt": f"{n}*{n}=", "answer": str(n * n)} for n in range(count)]


def halves(split: str, start: int = 0) -> list[dict[str, str]] | None:
    """Rows for both splits, and no other."""
    numbers = {"train": range(start, 4), "validation": range(4, 6)}.get(split)
    return None if numbers is None else [{"prompt": f"{n}/2="} for n in numbers]


class Notes:
    """Writes one line per step."""

    def __init__(self, run_dir: Path, file: str = "notes.txt") -> None:
        self.path = run_dir / file

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {len(metrics)}\n")

    def close(self) -> None:
        with self.path.open("a") as file:
            file.write("closed\n")


class Parrot:
    """Says the same digit to everything. The weights it is given leave no trace."""

    weight_transports = ("in_process", "shared_memory", "object_store")

    def __init__(self, worker: WorkerContext, policy: PolicyConfig, token: int = 5, repeat: int = 2) -> None:
        self.worker, self.policy, self.said = worker, policy, (token,) * repeat

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        answer = Completion(self.said, (-0.5,) * len(self.said), "stop")
        return [[answer for _ in request.seeds] for request in requests]

    def update_weights(self, handle: Any, version: int) -> None:
        pass

    def shutdown(self) -> None:
        pass


class GuideBackend:
    """A training backend in the shape that the architecture guide shows: made first, set up after."""

    summary = "as in the guide"
    supports = frozenset({"packing"})

    def setup(self, config: PolicyConfig) -> None:
        self.model = config.model_name

    def train_step(self, batch: Any, loss: Any) -> dict[str, float]:
        return {"loss": 0.0}

    def export_weights(self) -> Iterator[Any]:
        return iter(())

    def shutdown(self) -> None:
        pass
