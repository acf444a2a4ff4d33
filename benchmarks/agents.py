"""64 conversations with a slow tool: turns taken together, each episode at its own pace, and what could not be less.

    python benchmarks/agents.py --repeats 3 --json

A tool's answer takes 0 to 2 s, drawn anew for each turn of each episode with a fixed seed. ``floor``: the longest
episode's tool time, plus the whole generation where tools take no time at all. Seconds of wall time, since waiting is
what is measured; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table, start_side

THREADS = limit_threads()

from nemorl.config.load import load_config  # noqa: E402  after the thread limit
from nemorl.contracts.environment import Environment  # noqa: E402
from nemorl.types import Prompt, SamplingParams, Score, Step  # noqa: E402
from nemorl_rl.data.tokenizer import Tokenizer  # noqa: E402
from nemorl_rl.environments import EnvironmentPool  # noqa: E402
from nemorl_rl.models.tiny import write_tiny_model  # noqa: E402
from nemorl_rl.placement.engines import standalone_generation  # noqa: E402
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan  # noqa: E402
from nemorl_rl.rollouts.prompts import to_prompts  # noqa: E402

EPISODES, GROUP, TURNS, TOKENS, SLOWEST_S = 64, 8, 4, 16, 2.0


class SlowTool(Environment):
    """Answers every turn after a while."""

    name = "slow_tool"

    def __init__(self, slowest_s: float) -> None:
        self.slowest_s = slowest_s
        self.draw = random.Random(11)
        self.waited: list[list[float]] = []

    def start(self, prompt: Prompt) -> Any:
        delays = [self.draw.random() * self.slowest_s for _ in range(TURNS)]
        self.waited.append(delays)
        return _Talk(delays)


class _Talk:
    def __init__(self, delays: list[float]) -> None:
        self.delays = iter(delays)

    async def step(self, response: str) -> Step:
        await asyncio.sleep(next(self.delays))
        return Step(Score(1.0), observation=" and", done=False)


def rollout(parts: tuple[Any, Tokenizer], turns: Any, slowest_s: float) -> tuple[float, float]:
    """Seconds of a rollout, and of the tools of its slowest episode."""
    engine, tokenizer = parts
    tool = SlowTool(slowest_s)
    pool = EnvironmentPool(tool, turns=turns, concurrency=EPISODES)
    rollouts = RolloutEngine(engine, pool, tokenizer, max_sequence_tokens=256)
    prompts = to_prompts([{"prompt": f"{index}+1="} for index in range(EPISODES // GROUP)], tokenizer)
    plan = RolloutPlan(GROUP, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True), max_turns=TURNS)
    began = time.perf_counter()
    rollouts.collect(prompts, plan, seed=3)
    took = time.perf_counter() - began
    pool.close()
    return took, max(map(sum, tool.waited))


def measure(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        config = load_config(
            {
                "algorithm": "grpo",
                "model": str(model),
                "policy": {"max_sequence_tokens": 256, "init": "random"},
                "generation": {"max_new_tokens": TOKENS},
            }
        )
        engine = standalone_generation(config.generation, config.policy)  # type: ignore[attr-defined]
        parts = engine, Tokenizer.of(config.policy)
        rollout(parts, "free", 0.0)
        found: dict[str, list[float]] = {"together": [], "free": [], "floor": []}
        for _ in range(repeats):
            for turns in ("together", "free"):
                took, tools = rollout(parts, turns, SLOWEST_S)
                found[turns].append(took)
            found["floor"].append(tools + rollout(parts, "free", 0.0)[0])
        engine.shutdown()
    medians = {f"{side}_s": statistics.median(values) for side, values in found.items()}
    pairs = list(zip(found["together"], found["free"], found["floor"], strict=True))
    return {
        **medians,
        "together_over_free": statistics.median(a / b for a, b, _ in pairs),
        "free_over_floor": statistics.median(b / c for _, b, c in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    arguments = parser.parse_args()
    start_side(THREADS)
    result = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps({**result, "machine": machine(THREADS)}))
        return
    print(machine(THREADS))
    print_table("A rollout of 64 conversations", [*result], [[f"{value:.3g}" for value in result.values()]])


if __name__ == "__main__":
    main()
