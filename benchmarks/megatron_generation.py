"""Generation backends ``hf`` and ``megatron`` side by side: the same weights, requests and seeds, in turn, one process.

    python benchmarks/megatron_generation.py --rounds 3

Both draw the same tokens; that is checked. CPU seconds of the process, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table, start_side, write_model

THREADS = limit_threads()
BACKENDS = ("hf", "megatron")
PROMPTS, SAMPLES = 16, 4
MAX_SEQUENCE_TOKENS = 256


def build(backend: str, model: Path) -> Any:
    """An engine as a run builds it."""
    from nemorl.config import GenerationConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext

    policy = PolicyConfig(model_name=str(model), max_sequence_tokens=MAX_SEQUENCE_TOKENS)
    generation = GenerationConfig.model_validate({"backend": backend})
    return generation.backend.build(generation, policy, WorkerContext(), None)


def make_requests(new_tokens: int) -> list[Any]:
    """Prompts of 3 to 20 tokens, four samples each."""
    from nemorl.types import GenerationRequest, SamplingParams

    draw = random.Random(0)
    sampling = SamplingParams(max_new_tokens=new_tokens)
    return [
        GenerationRequest(
            tuple(draw.randrange(8, 80) for _ in range(draw.randint(3, 20))), sampling, tuple(range(SAMPLES))
        )
        for _ in range(PROMPTS)
    ]


def measure(engines: dict[str, Any], requests: list[Any], rounds: int) -> dict[str, list[float]]:
    """Response tokens per CPU second of each engine, by round. The first generation of each is not counted."""
    said = [
        [[completion.token_ids for completion in group] for group in engine.generate(requests)]
        for engine in engines.values()
    ]
    assert all(tokens == said[0] for tokens in said), "the backends drew different tokens"
    count = sum(len(ids) for group in said[0] for ids in group)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            start = time.process_time()
            engine.generate(requests)
            found[name].append(count / (time.process_time() - start))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", default="64,200", help="responses of at most this many tokens, several cases")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    start_side(THREADS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        engines = {name: build(name, model) for name in BACKENDS}
        for case in map(int, arguments.new_tokens.split(",")):
            found = measure(engines, make_requests(case), arguments.rounds)
            hf, megatron = (statistics.median(found[name]) for name in BACKENDS)
            rows.append([str(case), f"{hf:,.0f}", f"{megatron:,.0f}", f"{megatron / hf:.2f}"])
    columns = ["new tokens", "hf tok/s", "megatron tok/s", "ratio"]
    print_table(f"{PROMPTS} prompts, {SAMPLES} samples each", columns, rows)


if __name__ == "__main__":
    main()
