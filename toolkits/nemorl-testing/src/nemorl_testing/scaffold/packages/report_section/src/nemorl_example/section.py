"""The section: a function of what a run left behind. It returns plain data, which the report draws and escapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Section, Table, Text

PROMPT_CHARS = 120


@dataclass(frozen=True)
class HardestPrompts:
    """The prompts with the lowest mean reward."""

    count: int

    def __call__(self, run: RunData) -> Section | None:
        rows = ranked(run.samples)
        if not rows:
            return None  # the run recorded no samples: the report leaves the section out
        worst = rows[: self.count]
        table = Table(["prompt", "responses", "mean reward"], [[p[:PROMPT_CHARS], n, mean] for p, n, mean in worst])
        return Section("Hardest prompts", [Text(f"Of {len(rows)} prompts with recorded samples."), table])


def ranked(samples: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, float]]:
    """(prompt, responses, mean reward), lowest first. Records of another shape are passed over: a file may be old."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        prompt, reward = sample.get("prompt"), sample.get("reward")
        if isinstance(prompt, str) and isinstance(reward, int | float):
            rewards[prompt].append(reward)
    found = [(prompt, len(given), fmean(given)) for prompt, given in rewards.items()]
    return sorted(found, key=lambda row: row[2])
