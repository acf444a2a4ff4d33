"""GRPO when one response of every batch is scored slowly: synchronous rollouts against asynchronous ones.

    python benchmarks/async_straggler.py --straggler-seconds 10 --json

A tiny model on two Ray workers, one that trains and one that samples. The reward function sleeps on the first response
of one prompt in eight, one per batch, as a sandbox or a judge that hangs would. Synchronous steps wait for it;
asynchronous ones train on groups that are done, and drop the late one once it is older than ``--staleness`` updates.
What a mode gains in speed it must not lose in learning, hence the rewards beside the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _common import WARMUP_STEPS, limit_threads, machine, print_table

THREADS = limit_threads()
PROMPTS, GENERATIONS = 8, 4
DIGITS = range(30)
ROWS = [{"prompt": f"{a}+{b}="} for a in DIGITS for b in DIGITS]
"""More rows than any run here draws, so that a prompt is sampled once."""


@dataclass(frozen=True)
class Outcome:
    """One mode's run. Steps are counted after the warm-up."""

    mode: str
    steps: int
    step_s: float
    """Median wall seconds of a step."""
    slowest_s: float
    exposed_generation_s: float
    """Median wall seconds in which the trainer had nothing to train on."""
    run_s: float
    """Wall seconds of the whole run, starting and stopping its workers included."""
    dropped_groups: int
    """Of all steps: too old to train on."""
    mean_age: float
    """Updates between the weights that sampled and those that learnt, over samples."""
    reward_first: float
    reward_last: float
    """Mean over the first and the last three steps."""


class SlowReward:
    """Digits of a response; one prompt in every ``PROMPTS`` makes its first response wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._seen: set[str] = set()

    def __call__(self, prompt: str, response: str) -> float:
        with self._lock:
            is_new = prompt not in self._seen
            self._seen.add(prompt)
            is_straggler = is_new and len(self._seen) % PROMPTS == 0
        if is_straggler:
            time.sleep(self.seconds)
        return float(sum(character.isdigit() for character in response))


def run(mode: str, model: Path, folder: Path, arguments: argparse.Namespace) -> Outcome:
    """Train in one mode and read its metrics."""
    from nemorl_cli.console import Console
    from nemorl_grpo.config import GRPOConfig

    settings: dict[str, Any] = {
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-2}, "max_sequence_tokens": 64},
        "num_prompts_per_step": PROMPTS,
        "num_generations_per_prompt": GENERATIONS,
        "kl_penalty": 0.0,
        "importance_correction": "truncated",
        "generation": {"max_new_tokens": 8},
        "rollouts": {"mode": mode, "max_staleness": arguments.staleness},
        "cluster": {"workers_per_node": 2, "colocated": False, "cpus_per_worker": 0.5},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False},
        "max_steps": arguments.steps,
        "seed": arguments.seed,
        "run_dir": folder / mode,
    }
    started = time.monotonic()
    trainer = GRPOConfig(**settings).build()
    result = trainer.fit(dataset=ROWS, reward_fn=SlowReward(arguments.straggler_seconds), console=Console(quiet=True))
    seconds = time.monotonic() - started

    def curve(name: str) -> list[float]:
        return [record.get(name, 0.0) for record in result.history if "train/loss" in record]

    step_s = curve("timing/train/total_step_time")[WARMUP_STEPS:]
    waits = curve("timing/train/exposed_generation" if mode == "async" else "timing/train/generation")
    if mode == "sync":
        waits = [a + b for a, b in zip(waits, curve("timing/train/reward_calculation"), strict=True)]
    rewards = curve("train/reward")
    return Outcome(
        mode=mode,
        steps=len(step_s),
        step_s=statistics.median(step_s),
        slowest_s=max(step_s),
        exposed_generation_s=statistics.median(waits[WARMUP_STEPS:]),
        run_s=seconds,
        dropped_groups=int(sum(curve("train/dropped_stale_groups"))),
        mean_age=statistics.fmean(curve("train/avg_trajectory_age")),
        reward_first=statistics.fmean(rewards[:3]),
        reward_last=statistics.fmean(rewards[-3:]),
    )


def report(outcomes: list[Outcome], arguments: argparse.Namespace) -> None:
    columns = ["mode", "s/step", "slowest", "waiting s/step", "run s", "dropped groups", "mean age", "reward, 3 steps"]
    rows = [
        [
            o.mode,
            f"{o.step_s:.2f}",
            f"{o.slowest_s:.2f}",
            f"{o.exposed_generation_s:.2f}",
            f"{o.run_s:.0f}",
            str(o.dropped_groups),
            f"{o.mean_age:.2f}",
            f"{o.reward_first:.2f} -> {o.reward_last:.2f}",
        ]
        for o in outcomes
    ]
    title = f"{arguments.steps} steps, one response of each batch takes {arguments.straggler_seconds:g} s to score"
    print_table(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--straggler-seconds", type=float, default=10.0)
    parser.add_argument(
        "--steps", type=int, default=12, help="per mode; the synchronous one pays the straggler each time"
    )
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--modes", default="sync,async")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON, too")
    arguments = parser.parse_args()

    from nemorl_rl.models.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = write_tiny_model(folder / "model", **sizes)
        outcomes = [run(mode, model, folder, arguments) for mode in arguments.modes.split(",")]
    print(machine(THREADS))
    report(outcomes, arguments)
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main()
