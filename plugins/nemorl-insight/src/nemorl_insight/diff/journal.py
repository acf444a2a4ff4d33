"""The state of a bisection: what was asked, and the answer of every probe so far. A later call goes on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl.base.text.reading import parse_json
from nemorl.errors import UsageError
from nemorl_cli.report.comparing.numbers import Estimate

from nemorl_insight.diff.probing import Measured
from nemorl_insight.diff.searching import Outcome

FILE = "bisection.json"


@dataclass(frozen=True)
class Probe:
    """One that was made."""

    name: str
    """Of its folder."""
    tried: str
    """Which differences, or which checkpoint: the same for the same question."""
    outcome: Outcome
    text: str
    """The probe in words: its setting, its result and its meaning."""
    measured: Measured


class Journal:
    """``bisection.json`` in the folder of a bisection."""

    def __init__(self, folder: Path, question: Mapping[str, Any]) -> None:
        """
        Args:
            folder: Of the search.
            question: What is being asked.

        Raises:
            UsageError: the folder holds another bisection.
        """
        self.folder, self._question = folder, dict(question)
        self.probes: list[Probe] = []
        file = folder / FILE
        if file.is_file():
            data = parse_json(file.read_text(encoding="utf-8"))
            other = {key: value for key, value in data["question"].items() if self._question.get(key) != value}
            if other:
                raise UsageError(
                    f"{folder} holds a bisection of another question ({', '.join(other)} differ)",
                    fix="ask it again in the same words to go on, or give another --output",
                )
            self.probes = [_probe(one) for one in data["probes"]]

    def find(self, tried: str) -> Probe | None:
        return next((probe for probe in self.probes if probe.tried == tried), None)

    def add(self, probe: Probe) -> None:
        self.probes.append(probe)
        data = {"question": self._question, "probes": [asdict(one) for one in self.probes]}
        replace_text(self.folder / FILE, json.dumps(data, indent=1))


def _probe(data: Mapping[str, Any]) -> Probe:
    estimate = data["measured"]["estimate"]
    measured = Measured(Estimate(**estimate) if estimate is not None else None, data["measured"]["problem"])
    return Probe(data["name"], data["tried"], data["outcome"], data["text"], measured)
