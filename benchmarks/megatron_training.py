"""Training backend ``megatron`` in each of its layouts, beside ``dtensor``: the same weights, batch and loss.

    python benchmarks/megatron_training.py --rounds 5 --json

The sides take turns in one process. All find the same gradient norm; that is checked. CPU seconds of the process, so
that other work on the machine counts little. ``--lengths``: responses of 16 to 200 tokens (``even``), of exponentially
distributed lengths with mean 90 and at most 512 (``natural``), one in eight of 512 and the others of 16 to 64
(``long``), or groups of 8 responses of 64 tokens to prompts of 128 (``groups``).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table, start_side, write_model

THREADS = limit_threads()
SIDES: dict[str, Any] = {
    "dtensor": "dtensor",
    **{layout: {"name": "megatron", "layout": layout} for layout in ("padded", "packed", "shared")},
}
LONGEST_RESPONSE = 512
MEAN_RESPONSE = 90
MAX_SEQUENCE_TOKENS = 20 + LONGEST_RESPONSE
SPREADS = ("even", "natural", "long", "groups")
PROMPT, RESPONSE, GROUP = 128, 64, 8


def build(backend: Any, model: Path, microbatch_tokens: int | None) -> Any:
    """A trainer as a run builds it."""
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext

    policy = PolicyConfig.model_validate(
        {
            "model_name": str(model),
            "backend": backend,
            "optimizer": {"lr": 1e-9},
            "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
            "microbatch_tokens": microbatch_tokens,
        }
    )
    return policy.backend.build(policy, WorkerContext(), reference=False)


def response_tokens(spread: str, draw: random.Random) -> int:
    if spread == "natural":
        return min(LONGEST_RESPONSE, 1 + int(draw.expovariate(1 / MEAN_RESPONSE)))
    if spread == "long":
        return LONGEST_RESPONSE if draw.random() < 1 / 8 else draw.randint(16, 64)
    return draw.randint(16, 200)


def make_batch(sequences: int, spread: str) -> Any:
    """Prompts of 3 to 20 tokens, unless in groups, and responses that are trained on."""
    from nemorl_tensors import TokenBatch

    draw = random.Random(0)
    if spread == "groups":
        prompts = [[draw.randrange(8, 80) for _ in range(PROMPT)] for _ in range(sequences // GROUP)]
        ids = [prompt + [draw.randrange(8, 80) for _ in range(RESPONSE)] for prompt in prompts for _ in range(GROUP)]
        return TokenBatch.from_sequences(ids, [[False] * PROMPT + [True] * RESPONSE for _ in ids])
    shapes = [(draw.randint(3, 20), response_tokens(spread, draw)) for _ in range(sequences)]
    ids = [[draw.randrange(8, 80) for _ in range(prompt + response)] for prompt, response in shapes]
    return TokenBatch.from_sequences(ids, [[False] * prompt + [True] * response for prompt, response in shapes])


def computed_tokens(batch: Any, budget: int, layout: str, *, interleaved: bool) -> int:
    """Tokens that the layers compute of a batch, padding included; ``interleaved``: pipeline stages in two parts."""
    from nemorl_megatron import layout as layouts
    from nemorl_megatron.parallel import Parallel, Place, Sizes
    from nemorl_megatron.pipeline import microbatches

    sizes = Sizes(pipeline=2, virtual_pipeline=2) if interleaved else Sizes()
    parallel = Parallel(sizes, 0, "cpu", tuple(Place(rank, 0, rank, 0, 0, 0, 0) for rank in range(sizes.pipeline)))
    chosen = {"padded": layouts.PADDED, "packed": layouts.PACKED, "shared": layouts.SHARED}[layout]
    return sum(part.rows.input_ids.numel() for part in microbatches(batch, budget, parallel, chosen))


def measure(trainers: dict[str, Any], batch: Any, rounds: int) -> dict[str, dict[str, list[float]]]:
    """CPU seconds of steps and of scoring, by side. The first of each is not counted."""
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
                    found[name][what].append(time.process_time() - start)
    return found


def report(found: dict[str, dict[str, list[float]]], batch: Any, title: str) -> dict[str, Any]:
    """Print a table; the figures of it."""
    medians = {what: {name: statistics.median(found[name][what]) for name in found} for what in ("train", "score")}
    ratios = {
        what: {
            "padded/packed": cpu["padded"] / cpu["packed"],
            "padded/shared": cpu["padded"] / cpu["shared"],
            "dtensor/best": cpu["dtensor"] / min(cpu["packed"], cpu["shared"]),
        }
        for what, cpu in medians.items()
    }
    rows = [
        [what, *(f"{batch.num_tokens / cpu[name]:,.0f}" for name in cpu), *(f"{r:.2f}" for r in ratios[what].values())]
        for what, cpu in medians.items()
    ]
    print_table(title, ["tok/s", *medians["train"], *ratios["train"]], rows)
    return {"cpu_s": medians, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--lengths", choices=SPREADS, nargs="+", default=[*SPREADS])
    parser.add_argument("--microbatch-tokens", type=int, default=None, help="default: as a run has it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    start_side(THREADS)
    from nemorl_tensors.engines.rows import default_microbatch_tokens

    budget = arguments.microbatch_tokens or default_microbatch_tokens("cpu")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        trainers = {name: build(side, model, budget) for name, side in SIDES.items()}
        for spread in arguments.lengths:
            batch = make_batch(arguments.sequences, spread)
            found = measure(trainers, batch, arguments.rounds)
            tokens = {
                layout: computed_tokens(batch, budget, layout, interleaved=False)
                for layout in ("padded", "packed", "shared")
            }
            for layout in ("padded", "packed"):
                tokens[f"{layout}, interleaved stages"] = computed_tokens(batch, budget, layout, interleaved=True)
            title = (
                f"{spread}: {arguments.sequences} sequences, {batch.num_tokens} tokens, medians of {arguments.rounds}"
            )
            figures[spread] = {"tokens": batch.num_tokens, "computed": tokens, **report(found, batch, title)}
            print(f"computed tokens: {', '.join(f'{name} {count:,}' for name, count in tokens.items())}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
