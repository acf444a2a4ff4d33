"""Training backends ``dtensor`` and ``megatron`` side by side: the same weights, batch and loss, in turn, one process.

    python benchmarks/megatron_training.py --rounds 5

Both find the same gradient norm; that is checked. CPU seconds of the process, so that other work on the machine counts
little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table, start_side, write_model

THREADS = limit_threads()
BACKENDS = ("dtensor", "megatron")
MAX_SEQUENCE_TOKENS = 256


def build(backend: str, model: Path) -> Any:
    """A trainer as a run builds it."""
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext

    policy = PolicyConfig.model_validate(
        {
            "model_name": str(model),
            "backend": backend,
            "optimizer": {"lr": 1e-9},
            "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        }
    )
    return policy.backend.build(policy, WorkerContext(), reference=False)


def make_batch(sequences: int) -> Any:
    """Prompts of 3 to 20 tokens and responses of 16 to 200."""
    from nemorl_tensors import TokenBatch

    draw = random.Random(0)
    shapes = [(draw.randint(3, 20), draw.randint(16, 200)) for _ in range(sequences)]
    ids = [[draw.randrange(8, 80) for _ in range(prompt + response)] for prompt, response in shapes]
    return TokenBatch.from_sequences(ids, [[False] * prompt + [True] * response for prompt, response in shapes])


def measure(trainers: dict[str, Any], batch: Any, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per CPU second of steps and of scoring, by backend. The first of each is not counted."""
    from nemorl_sft.loss import NLLLoss

    norms = [trainer.train_step(batch, NLLLoss())["grad_norm"].value for trainer in trainers.values()]
    assert max(norms) - min(norms) < 1e-3 * max(norms), f"gradient norms differ: {norms}"
    found: dict[str, dict[str, list[float]]] = {name: {"train": [], "score": []} for name in trainers}
    for round_ in range(rounds + 1):
        for name, trainer in trainers.items():
            calls = {
                "train": partial(trainer.train_step, batch, NLLLoss()),
                "score": partial(trainer.get_logprobs, batch),
            }
            for what, call in calls.items():
                start = time.process_time()
                call()
                if round_:
                    found[name][what].append(batch.num_tokens / (time.process_time() - start))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    start_side(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        trainers = {name: build(name, model) for name in BACKENDS}
        found = measure(trainers, make_batch(arguments.sequences), arguments.rounds)
    rows = []
    for what in ("train", "score"):
        dtensor, megatron = (statistics.median(found[name][what]) for name in BACKENDS)
        rows.append([what, f"{dtensor:,.0f}", f"{megatron:,.0f}", f"{megatron / dtensor:.2f}"])
    title = f"{arguments.sequences} sequences, medians of {arguments.rounds}"
    print_table(title, ["", *(f"{name}, tok/s" for name in BACKENDS), "ratio"], rows)


if __name__ == "__main__":
    main()
