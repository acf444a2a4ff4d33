"""Seconds that a run loses when half, or all, of its engines are killed, and that an added engine takes to work.

    python benchmarks/elastic_engines.py [--engines 2] [--steps 12] [--tokens 64]
    python benchmarks/elastic_engines.py --lend 3 [--steps 12] [--tokens 64]

Synchronous GRPO of a tiny model on a private Ray of this machine; engines are killed 0.1 s after step 4 began.
``step``: the median of undisturbed steps of the same run. ``struck``: the step in which they were killed. ``lost``: its
excess over ``step``, and that of the steps until they are back. ``same``: numbers and weights equal those of the
undisturbed run.

With ``--lend N``: one trainer and one engine, without and with another engine on the trainer's device
(``cluster.lend_training_devices``), N times each in turn. ``step`` as above, and ``rollout`` of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from nemorl_rl.callbacks import Callback
from nemorl_rl.models.tiny import write_tiny_model

ROWS = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
STRUCK, WAIT_S = 4, 300.0
NAMES = ("step", "train/reward", "train/loss", "train/grad_norm", "train/total_num_tokens")


class Clock(Callback):
    """When steps begin, and what happens in step ``STRUCK``."""

    def __init__(self, killed: int = 0, added: int = 0) -> None:
        self.killed, self.added = killed, added
        self.begun: list[float] = []
        self.sizes: list[int] = []
        self.starts_s: list[float] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        fleet = trainer.generation.workers
        self.begun.append(time.monotonic())
        self.sizes.append(fleet.data_parallel_size)
        if step == STRUCK and self.killed:
            pids = [facts.pid for facts in fleet.facts[: self.killed]]
            threading.Timer(0.1, kill, (pids,)).start()
        if step == STRUCK and self.added:
            fleet.add(self.added, 5.0)
            end = time.monotonic() + WAIT_S
            while any(engine["state"] != "ready" for engine in fleet.as_json()) and time.monotonic() < end:
                time.sleep(0.05)  # training waits, so that it takes no processor from the start
            self.starts_s = [engine["start_s"] for engine in fleet.as_json()[-self.added :]]

    @property
    def steps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.begun, self.begun[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lend", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    engines = arguments.engines
    with tempfile.TemporaryDirectory() as place:
        model = write_tiny_model(Path(place) / "model")
        if arguments.lend:
            lend(model, Path(place), arguments)
            return
        quiet = Clock()
        wanted = outcome(run(model, Path(place) / "quiet", quiet, arguments, engines))
        print(json.dumps({"run": "undisturbed", "step": round(statistics.median(quiet.steps_s[1:]), 3)}), flush=True)
        for name, killed in (("half killed", engines // 2), ("all killed", engines)):
            clock = Clock(killed=killed)
            found = outcome(run(model, Path(place) / name.replace(" ", "-"), clock, arguments, engines))
            print(json.dumps({"run": name, **figures(clock, engines), "same": found == wanted}), flush=True)
        clock = Clock(added=1)
        found = outcome(run(model, Path(place) / "added", clock, arguments, engines))
        print(json.dumps({"run": "one added", "start": clock.starts_s[0], "same": found == wanted}), flush=True)


def lend(model: Path, place: Path, arguments: argparse.Namespace) -> None:
    """Print both layouts, in pairs."""
    ratios, outcomes = [], []
    for number in range(arguments.lend):
        seconds = {}
        for name, more in (("apart", {}), ("lent", {"lend_training_devices": True, "take_turns": True})):
            clock = Clock()
            result = run(model, place / f"{name}-{number}", clock, arguments, 1, **more)
            rollouts = [record["timing/train/generation"] for record in result.history if "train/loss" in record]
            step, rollout = statistics.median(clock.steps_s[1:]), statistics.median(rollouts[1:])
            print(json.dumps({"run": name, "step": round(step, 3), "rollout": round(rollout, 3)}), flush=True)
            seconds[name] = step
            outcomes.append(outcome(result))
        ratios.append(seconds["apart"] / seconds["lent"])
    is_same = all(found == outcomes[0] for found in outcomes)
    print(json.dumps({"speedup": round(statistics.median(ratios), 2), "of": ratios, "same": is_same}), flush=True)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def run(
    model: Path, run_dir: Path, clock: Clock, arguments: argparse.Namespace, engines: int, **more: Any
) -> TrainResult:
    cluster = {**more, "workers_per_node": 1 + engines, "colocated": False, "generation_workers": engines}
    config = GRPOConfig(
        model=str(model),
        policy={"init": "random", "optimizer": {"lr": 1e-3}, "max_sequence_tokens": 2 * arguments.tokens},
        num_prompts_per_step=8,
        num_generations_per_prompt=8,
        generation={"max_new_tokens": arguments.tokens},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0},
        max_steps=arguments.steps,
        cluster={**cluster, "cpus_per_worker": 1 / (2 + engines)},
        run_dir=run_dir,
    )
    result: TrainResult = config.build().fit(
        dataset=ROWS, reward_fn=digits, callbacks=[clock], console=Console(quiet=True)
    )
    return result


def digits(prompt: str, response: str) -> float:
    return float(sum(character.isdigit() for character in response))


def outcome(result: TrainResult) -> tuple[list[list[float]], bytes]:
    steps = [[record[name] for name in NAMES] for record in result.history if "train/loss" in record]
    return steps, (result.run_dir / "model" / "model.safetensors").read_bytes()


def figures(clock: Clock, engines: int) -> dict[str, Any]:
    """Of a run that was struck."""
    steps = clock.steps_s
    step = statistics.median(steps[1 : STRUCK - 1])
    back = next((number for number in range(STRUCK, len(steps)) if clock.sizes[number] == engines), len(steps))
    return {
        "step": round(step, 3),
        "struck": round(steps[STRUCK - 1], 3),
        "back_in_step": back + 1,
        "lost": round(sum(took - step for took in steps[STRUCK - 1 : back]), 3),
    }


if __name__ == "__main__":
    main()
