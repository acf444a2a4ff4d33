"""Tokens until 90 % of held-out sums are right, by how the prompts of a step are chosen.

    python benchmarks/curriculum.py --json
    python benchmarks/curriculum.py --arms uniform,thompson --seeds 1

Problems of three difficulties: half of them sums that the warmed-up model solves, a quarter sums that it gets right two
times out of five, a quarter such that it gets right one time out of five. One warm-up (SFT on answers of a
teacher who is sloppy to these degrees) serves all runs; a seed changes the order of the data and every sampled token.
Then GRPO, rewarded when an answer is right. Arms differ in ``data.sampling`` and ``dynamic_sampling`` alone.

Tokens are all that a step samples, prompts included, those of groups that a filter rejects too; validation is not
counted. A run ends with the first validation at or above the goal, or after ``--steps``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side

THREADS = limit_threads()

from nemorl import Callback, Console  # noqa: E402  after the thread limit
from nemorl.config import load_config  # noqa: E402
from nemorl.types import Row  # noqa: E402
from nemorl_rl.models.tiny import write_tiny_model  # noqa: E402
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
    "easy": ((10, 29), (0,), 360),
    "medium": ((30, 49), (0, 1, 0, 1, 1), 180),
    "hard": ((50, 69), (0, 1, 1, 1, 1), 180),
}
"""Operands, how far off each of the teacher's answers is, and problems to train on."""
HELD_OUT_FRAC = 1 / 9
"""Of the problems to train on: as many more are held out."""
GOAL, LR = 0.9, 2e-4


def problems(level: str) -> list[Row]:
    """All problems of a level, in an order that is always the same."""
    (low, high), _, _ = LEVELS[level]
    numbers = range(low, high + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(level).shuffle(pairs)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": level} for a, b in pairs]


def splits() -> dict[str, list[Row]]:
    """Rows to warm up with, to reinforce and to validate on; the last are in neither of the others."""
    found: dict[str, list[Row]] = {"warm": [], "train": [], "held_out": []}
    for level, (_, offsets, count) in LEVELS.items():
        rows = problems(level)
        held_out = round(count * HELD_OUT_FRAC)
        found["held_out"] += rows[:held_out]
        found["train"] += rows[held_out : held_out + count]
        found["warm"] += [
            {"prompt": row["prompt"], "response": str(int(row["answer"]) + offset)}
            for row in rows[held_out:]
            for offset in offsets * (5 // len(offsets))
        ]
    return found


def warm_up(folder: Path, rows: Sequence[Row], steps: int) -> Path:
    """The model that all arms begin with."""
    base = write_tiny_model(folder / "base", **recipe.MODEL_SIZE)
    config = {**recipe.sft_config(base, folder / "sft", 0), "max_steps": steps, "checkpoint": {"every": 0}}
    del config["data"]
    load_config(config).build().fit(rows, console=Console(quiet=True))
    return folder / "sft" / "model"


class Counts(Callback):
    """Tokens that steps sample, and the accuracy after them; stops the run at the goal."""

    essential = True

    def __init__(self) -> None:
        self.tokens = 0
        self.curve: list[tuple[int, int, float]] = []
        """Step, tokens so far, accuracy"""
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

    def on_validation_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.curve.append((step, self.tokens, metrics["accuracy"]))
        if metrics["accuracy"] >= GOAL:
            trainer.stop("the goal is reached")


def run(arm: str, seed: int, model: Path, rows: Mapping[str, Sequence[Row]], steps: int) -> dict[str, Any]:
    """One run of one arm."""
    seen, began = Counts(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        config = {
            **recipe.grpo_config(model, Path(folder) / "run", seed),
            "num_prompts_per_step": 48,
            "kl_penalty": 0.0,
            "max_steps": steps,
            "records": {"max_gib": 0},
            "policy": {"optimizer": {"lr": LR}, "schedule": {"warmup_steps": 10}},
            "validation": {"every": 4, "at_start": True, "num_generations": 3, "temperature": 1.0},
            "checkpoint": {"every": 0, "export": False},
            **ARMS[arm],
        }
        del config["data"]
        load_config(config).build().fit(
            rows["train"], val_dataset=rows["held_out"], callbacks=[seen], console=Console(quiet=True)
        )
    reached = [(step, tokens) for step, tokens, accuracy in seen.curve if accuracy >= GOAL]
    return {
        "arm": arm,
        "seed": seed,
        "tokens": reached[0][1] if reached else None,
        "steps": reached[0][0] if reached else None,
        "first_accuracy": seen.curve[0][2],
        "last_accuracy": seen.curve[-1][2],
        "all_tokens": seen.tokens,
        "cpu_s": time.process_time() - began,
        "curve": seen.curve,
    }


def summary(arm: str, runs: Sequence[Mapping[str, Any]], baseline: Mapping[int, int | None]) -> list[str]:
    """One line of the table. A run that did not reach the goal counts as more tokens than all others."""
    own = [one for one in runs if one["arm"] == arm]
    tokens = sorted(one["tokens"] if one["tokens"] is not None else float("inf") for one in own)
    ratios = [
        one["tokens"] / base
        for one in own
        if one["tokens"] is not None and (base := baseline.get(one["seed"])) is not None
    ]
    return [
        arm,
        f"{statistics.median(tokens) / 1000:.0f}k",
        f"{tokens[0] / 1000:.0f}k - {tokens[-1] / 1000:.0f}k",
        f"{statistics.median(ratios):.2f}" if ratios else "-",
        f"{statistics.median(one['steps'] or float('inf') for one in own):.0f}",
        f"{sum(one['tokens'] is not None for one in own)} of {len(own)}",
        f"{statistics.median(one['cpu_s'] for one in own):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80, help="at most, of a run")
    parser.add_argument("--warm-up", type=int, default=1000, help="steps of SFT")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    arguments = parser.parse_args()
    start_side(THREADS)
    rows, began = splits(), time.process_time()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    with tempfile.TemporaryDirectory() as folder:
        model = warm_up(Path(folder), rows["warm"], arguments.warm_up)
        warm_up_s = time.process_time() - began
        runs = [run(arm, seed, model, rows, arguments.steps) for seed in seeds for arm in arguments.arms.split(",")]
    if arguments.json:
        print(json.dumps({"machine": machine(THREADS), "warm_up_s": warm_up_s, "runs": runs}))
        return
    baseline = {one["seed"]: one["tokens"] for one in runs if one["arm"] == "uniform"}
    print(machine(THREADS), f"warm-up {warm_up_s:.0f} s, all {time.process_time() - began:.0f} s")
    columns = ["arm", "tokens, median", "range", "of uniform, paired", "steps", "reached", "CPU s"]
    table = [summary(arm, runs, baseline) for arm in arguments.arms.split(",")]
    print_table(f"Until {GOAL:.0%}", columns, table)


if __name__ == "__main__":
    main()
