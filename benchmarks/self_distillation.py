"""Tokens until 90 % of sums are right: distillation from oneself against GRPO.

    python benchmarks/self_distillation.py --warm-up-to model        once: the model that all runs begin with
    python benchmarks/self_distillation.py --model model --experts-to experts    once: the teachers of ``mopd``
    python benchmarks/self_distillation.py --model model --experts experts --seeds 3   a JSON object per line, the table

A tiny model is warmed up by SFT to two things. Asked ``12+30=``, it gives a teacher's answers, of which one in five is
right. Asked ``57:12+30=``, it gives the number before the colon, whatever it is: a policy that can use what it is told.
Then 200 of the sums are trained on. GRPO and SDPO are rewarded for right answers; to ``sdpo, feedback`` a wrong one is
answered as a failed test answers, with what was expected. OPSD and SDFT are given the answer as privileged text and no
reward. ``mopd`` has GRPO's rewards and two experts, each of which knows the sums of one domain (first operand below 25,
or not) and is no better than the policy in the other. A seed changes the order of the data and every sampled token.

The goal is 90 % of the responses to 100 of these sums, sampled at temperature 1 without any hint. Tokens are all that
steps sample, prompts included; those that a teacher reads beside are counted apart, validation not at all. A run ends
with the first validation at or above the goal, or beyond ``--tokens``.
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

from _curves import GOAL, SETTINGS, Curve, teach, thousands, warm_up  # noqa: E402  after the thread limit
from nemorl import Console  # noqa: E402
from nemorl.config import load_config  # noqa: E402
from nemorl.types import Row, Score  # noqa: E402
from nemorl_distillation.self_trainer import SelfTaughtTrainer  # noqa: E402

SINGLE = {"num_prompts_per_step": 32, "num_generations_per_prompt": 1, "topk": 32}
EIGHT = {"num_prompts_per_step": 8, "num_generations_per_prompt": 8}
FOUR = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}
TWO = {"num_prompts_per_step": 16, "num_generations_per_prompt": 2}
MOPD = {"algorithm": "mopd", "kl_penalty": 0.0, "teacher_column": "domain"}
SIBLINGS = {"teacher_prompt": "{demonstration}{prompt}", "demonstration_text": "{demonstration}:", "topk": 32}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm": "grpo", "kl_penalty": 0.0, **EIGHT},
    "grpo, groups of 4": {"algorithm": "grpo", "kl_penalty": 0.0, **FOUR},
    "grpo, groups of 2": {"algorithm": "grpo", "kl_penalty": 0.0, **TWO},
    "opsd": {"algorithm": "opsd", "teacher_prompt": "{solution}:{prompt}", **SINGLE},
    "sdft": {"algorithm": "sdft", "teacher_prompt": "{demonstration}:{prompt}", **SINGLE},
    "sdpo": {"algorithm": "sdpo", **SIBLINGS, **EIGHT},
    "sdpo, groups of 4": {"algorithm": "sdpo", **SIBLINGS, **FOUR},
    "sdpo, feedback": {
        "algorithm": "sdpo",
        "teacher_prompt": "{feedback}{prompt}",
        "feedback_text": "{feedback}:",
        **SINGLE,
    },
    "mopd": {**MOPD, **EIGHT},
    "mopd, groups of 4": {**MOPD, **FOUR},
    "mopd, groups of 2": {**MOPD, **TWO, "outcome_weight": 0.2},
    "sdft, current": {
        "algorithm": "sdft",
        "teacher_prompt": "{demonstration}:{prompt}",
        "teacher_weights": "current",
        **SINGLE,
    },
}
OPERANDS = range(10, 40)
OFFSETS = (0, 1, 1, 2, 3)
"""How far off each of the teacher's five answers to a problem is."""
DOMAINS = ("low", "high")
"""By the first operand, below 25 or not."""
TRAINED, VALIDATED = 200, 100
"""Problems to train on, and how many of them are validated."""


def judge(prompt: str, response: str, answer: str) -> Score:
    """1 for the right answer; of a wrong one, what was expected."""
    is_right = response.strip() == answer
    return Score(float(is_right), correct=is_right, feedback="" if is_right else answer)


def problems() -> list[Row]:
    """All problems, in an order that is always the same, with the answer in every column that an arm may want."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS]
    random.Random("sums").shuffle(pairs)
    answers = [(f"{a}+{b}=", str(a + b), DOMAINS[a >= 25]) for a, b in pairs]
    return [
        {"prompt": prompt, "answer": said, "solution": said, "response": said, "domain": domain}
        for prompt, said, domain in answers
    ]


def warm_up_rows() -> list[Row]:
    """Every problem five times with the teacher's answers, and five times behind some number that is to be repeated."""
    dice = random.Random("hints")
    rows: list[Row] = []
    for row in problems():
        for offset in OFFSETS:
            rows.append({"prompt": row["prompt"], "response": str(int(row["answer"]) + offset)})
            hint = str(dice.randint(10, 99))
            rows.append({"prompt": f"{hint}:{row['prompt']}", "response": hint})
    return rows


def train_experts(folder: Path, model: Path, steps: int = 400) -> None:
    """Write a model for each domain, taught the right answers of it."""
    for domain in DOMAINS:
        rows = [{name: row[name] for name in ("prompt", "response")} for row in problems() if row["domain"] == domain]
        teach(folder / domain, model, rows, steps)


class Counts(Curve):
    """Tokens that steps sample, and those that a teacher reads."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__(most_tokens)
        self.read = 0

    def on_rollout_end(self, trainer: Any, step: int, samples: Any) -> None:
        self.tokens += sum(sample.total_tokens for sample in samples)

    def on_fit_begin(self, trainer: Any) -> None:
        if isinstance(trainer, SelfTaughtTrainer):
            ask_teachers = trainer.ask_teachers

            def counted(samples: Any, batch: Any) -> Any:
                self.read += trainer.privileged(samples, batch).batch.num_tokens
                return ask_teachers(samples, batch)

            trainer.ask_teachers = counted  # type: ignore[method-assign]


def run(arm: str, seed: int, model: Path, experts: Path | None, most_tokens: int, lr: float) -> dict[str, Any]:
    """One run of one arm."""
    is_taught = ARMS[arm]["algorithm"] == "mopd"
    teachers = (
        {"teachers": {domain: {"model": str(experts / domain)} for domain in DOMAINS}} if is_taught and experts else {}
    )
    seen, began = Counts(most_tokens), time.process_time()
    rows = problems()[:TRAINED]
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "model": str(model),
            "run_dir": str(Path(folder) / "run"),
            "seed": seed,
            "generation": {"max_new_tokens": 6},
            "max_steps": 2000,
            "max_epochs": 2000,
            **SETTINGS,
            "policy": {"optimizer": {"lr": lr}, "schedule": {"warmup_steps": 10}},
            **ARMS[arm],
            **teachers,
        }
        trainer = load_config(config).build()
        trainer.fit(rows, judge, val_dataset=rows[:VALIDATED], callbacks=[seen], console=Console(quiet=True))
    cpu_s = round(time.process_time() - began, 1)
    return {"arm": arm, "seed": seed, "lr": lr, **seen.facts(), "read": seen.read, "cpu_s": cpu_s}


def summary(arm: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line of the table. A run that did not reach the goal counts as more tokens than all others."""
    own = [one for one in runs if one["arm"] == arm]
    tokens = [one["tokens"] or math.inf for one in own]
    return [
        arm,
        thousands(statistics.median(tokens), 1),
        ", ".join(thousands(each, 1) for each in tokens),
        f"{sum(one['tokens'] is not None for one in own)} of {len(own)}",
        thousands(statistics.median(one["read"] for one in own), 1),
        f"{statistics.median(one['steps'] or math.inf for one in own):.0f}",
        f"{statistics.median(one['last_accuracy'] for one in own):.2f}",
        f"{statistics.median(one['cpu_s'] for one in own):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--warm-up-to", type=Path, help="folder to write the warmed-up model to, and no more")
    parser.add_argument("--warm-up", type=int, default=1200, help="steps of SFT")
    parser.add_argument("--model", type=Path, help="the warmed-up model")
    parser.add_argument("--experts-to", type=Path, help="folder to write the teachers of mopd to, and no more")
    parser.add_argument("--experts", type=Path, help="that folder")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--tokens", type=int, default=150_000, help="at most, of a run")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    start_side(THREADS)
    if arguments.warm_up_to is not None:
        warm_up(arguments.warm_up_to, warm_up_rows(), arguments.warm_up)
        return
    if arguments.model is None:
        parser.error("--model is missing: write one with --warm-up-to")
    if arguments.experts_to is not None:
        train_experts(arguments.experts_to, arguments.model)
        return
    if arguments.experts is None and any(ARMS[arm]["algorithm"] == "mopd" for arm in arguments.arms):
        parser.error("--experts is missing: write them with --experts-to")
    print(machine(THREADS), flush=True)
    runs = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for arm in arguments.arms:
            runs.append(run(arm, seed, arguments.model, arguments.experts, arguments.tokens, arguments.lr))
            print(json.dumps(runs[-1]), flush=True)
    columns = ["arm", "tokens, median", "of each seed", "reached", "read", "steps", "last accuracy", "CPU s"]
    print_table(f"Until {GOAL:.0%}", columns, [summary(arm, runs) for arm in arguments.arms])


if __name__ == "__main__":
    main()
