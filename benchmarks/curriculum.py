"""Tokens until 90 % of sums are right, by how the prompts of a step are chosen.

    python benchmarks/curriculum.py --warm-up-to model        once: the model that all runs begin with
    python benchmarks/curriculum.py --model model --seeds 3   one JSON object per line, then the table

A tiny model is warmed up by SFT on a teacher's answers: sums of 10 to 29, always right (*easy*); of 30 to 49, right two
times out of five (*medium*); of 50 to 69, right one time out of five (*hard*). Then GRPO, rewarded when an answer is
right, where the answers of hard problems are wrong by seven: nothing can be learnt from these, as from mislabelled rows
or from problems beyond the model. ``--data`` says how many there are of each. Arms differ in ``data.sampling`` and
``dynamic_sampling`` alone; a seed changes the order of the data and every sampled token.

The goal is 90 % of the responses to 50 easy and 50 medium problems of the data, sampled at temperature 1.
Tokens are all that a step samples, prompts included, those of groups that a filter rejects too; validation is not
counted. A run ends with the first validation at or above the goal, or beyond ``--tokens``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side

THREADS = limit_threads()

from _curves import GOAL, SETTINGS, Curve, thousands, warm_up  # noqa: E402  after the thread limit
from nemorl import Console  # noqa: E402
from nemorl.config import load_config  # noqa: E402
from nemorl.types import Row  # noqa: E402
from nemorl_tasks.quickstart import recipe  # noqa: E402

ARMS: Mapping[str, Mapping[str, Any]] = {
    "uniform": {},
    "uniform + filter": {"dynamic_sampling": True},
    "pass_rate": {"prompt_sampling": "pass_rate"},
    "thompson": {"prompt_sampling": "thompson"},
    "budget": {"prompt_sampling": "budget"},
    "thompson + filter": {"prompt_sampling": "thompson", "dynamic_sampling": True},
}
LEVELS: Mapping[str, tuple[tuple[int, int], tuple[int, ...], int]] = {
    "easy": ((10, 29), (0,), 40),
    "medium": ((30, 49), (0, 1, 0, 1, 1), 20),
    "hard": ((50, 69), (0, 1, 1, 1, 1), 20),
}
"""Operands, how far off each of the teacher's answers is, and problems that the teacher does not show."""
DATA = {"solved": (300, 100, 100), "hopeless": (100, 100, 300)}
"""Problems of each level, where most are easy and where most cannot be solved."""
VALIDATED = 50
"""Problems of each level that is not hopeless."""


def problems(level: str) -> list[Row]:
    """All problems of a level, in an order that is always the same."""
    (low, high), *_ = LEVELS[level]
    numbers = range(low, high + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(level).shuffle(pairs)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": level} for a, b in pairs]


def warm_up_rows() -> list[Row]:
    """Nearly all problems, each five times, with the teacher's answers as ``response``."""
    return [
        {"prompt": row["prompt"], "response": str(int(row["answer"]) + offset)}
        for level, (_, offsets, untaught) in LEVELS.items()
        for row in problems(level)[untaught:]
        for offset in offsets * (5 // len(offsets))
    ]


def splits(data: str) -> tuple[list[Row], list[Row]]:
    """Rows to reinforce, and some of them to validate on."""
    train: list[Row] = []
    validated: list[Row] = []
    for level, count in zip(LEVELS, DATA[data], strict=True):
        wrong = 7 * (level == "hard")
        train += [{**row, "answer": str(int(row["answer"]) + wrong)} for row in problems(level)[50 : 50 + count]]
        validated += [] if wrong else train[-VALIDATED:]
    return train, validated


class Counts(Curve):
    """Tokens that steps sample, and not validation."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__(most_tokens)
        self._is_validating = False

    def on_fit_begin(self, trainer: Any) -> None:
        generate, validate = trainer.generation.generate, trainer.validate

        def counted(requests: Any) -> Any:
            answers = generate(requests)
            if not self._is_validating:
                for request, answer in zip(requests, answers, strict=True):
                    self.tokens += sum(len(request.token_ids) + len(one.token_ids) for one in answer)
            return answers

        def apart(rows: Any) -> Any:
            self._is_validating = True
            try:
                return validate(rows)
            finally:
                self._is_validating = False

        trainer.generation.generate, trainer.validate = counted, apart


def run(arm: str, seed: int, model: Path, data: str, most_tokens: int) -> dict[str, Any]:
    """One run of one arm."""
    seen, began = Counts(most_tokens), time.process_time()
    train, validated = splits(data)
    with tempfile.TemporaryDirectory() as folder:
        config = {
            **recipe.grpo_config(model, Path(folder) / "run", seed),
            "num_prompts_per_step": 32,
            "kl_penalty": 0.0,
            "max_steps": 1000,
            **SETTINGS,
            "policy": {"optimizer": {"lr": 3e-4}, "schedule": {"warmup_steps": 10}},
            **ARMS[arm],
        }
        del config["data"]
        load_config(config).build().fit(train, val_dataset=validated, callbacks=[seen], console=Console(quiet=True))
    return {"arm": arm, "seed": seed, **seen.facts(), "all_tokens": seen.tokens, "cpu_s": time.process_time() - began}


def summary(arm: str, runs: Sequence[Mapping[str, Any]], baseline: Mapping[int, int | None]) -> list[str]:
    """One line of the table. A run that did not reach the goal counts as more tokens than all others."""
    own = [one for one in runs if one["arm"] == arm]
    tokens = sorted(one["tokens"] or math.inf for one in own)
    both = [(one["tokens"], baseline.get(one["seed"])) for one in own]
    ratios = [mine / other for mine, other in both if mine is not None and other is not None]
    return [
        arm,
        thousands(statistics.median(tokens)),
        f"{thousands(tokens[0])} - {thousands(tokens[-1])}",
        f"{statistics.median(ratios):.2f}" if ratios else "",
        f"{sum(one['tokens'] is not None for one in own)} of {len(own)}",
        f"{statistics.median(one['last_accuracy'] for one in own):.2f}",
        f"{statistics.median(one['cpu_s'] for one in own):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--warm-up-to", type=Path, help="folder to write the warmed-up model to, and no more")
    parser.add_argument("--warm-up", type=int, default=800, help="steps of SFT")
    parser.add_argument("--model", type=Path, help="the warmed-up model")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", choices=list(DATA), default="hopeless")
    parser.add_argument("--tokens", type=int, default=600_000, help="at most, of a run")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    start_side(THREADS)
    if arguments.warm_up_to is not None:
        warm_up(arguments.warm_up_to, warm_up_rows(), arguments.warm_up)
        return
    if arguments.model is None:
        parser.error("--model is missing: write one with --warm-up-to")
    print(machine(THREADS), flush=True)
    arms, runs = arguments.arms.split(","), []
    for seed in range(arguments.seeds):
        for arm in arms:
            runs.append(run(arm, seed, arguments.model, arguments.data, arguments.tokens))
            print(json.dumps(runs[-1]), flush=True)
    baseline = {one["seed"]: one["tokens"] for one in runs if one["arm"] == "uniform"}
    columns = ["arm", "tokens, median", "range", "of uniform, paired", "reached", "last accuracy", "CPU s"]
    print_table(f"Until {GOAL:.0%}", columns, [summary(arm, runs, baseline) for arm in arms])


if __name__ == "__main__":
    main()
