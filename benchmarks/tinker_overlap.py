"""What training and sampling cost each other on one `nemorl serve --tinker`, by the engine that samples.

    python benchmarks/tinker_overlap.py [--backend hf --backend vllm] [--steps 10] [--json]

One client trains: a pass of 8 rows of 128 tokens and an optimizer step, again and again. Another one samples 16 answers
of 128 tokens, again and again. Each is timed by itself, then both at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table
from _tinker import NAME, Served, serving, write_model

THREADS = limit_threads()
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
ROWS, TOKENS, ANSWERS, ANSWER_TOKENS = 8, 128, 16, 128


def train(service: Any) -> Callable[[], None]:
    """Makes one pass and one step."""
    from tinker import types

    training = service.create_lora_training_client(NAME, rank=8, seed=0, train_unembed=False).result()
    rows = [[10 + (row * 7 + place * 3) % 80 for place in range(TOKENS + 1)] for row in range(ROWS)]
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})  # type: ignore[dict-item]
        for row in rows
    ]

    def step() -> None:
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        passed.result()

    return step


def sample(service: Any) -> Callable[[], None]:
    """Samples some answers of the weights of an adapter."""
    from tinker import types

    training = service.create_lora_training_client(NAME, rank=8, seed=1, train_unembed=False).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([*range(10, 42)])
    params = types.SamplingParams(max_tokens=ANSWER_TOKENS, stop=[])

    def answers() -> None:
        sampler.sample(prompt, ANSWERS, params).result()

    return answers


def timed(call: Callable[[], None], until: Callable[[int], bool]) -> float:
    """Median seconds."""
    found: list[float] = []
    while not until(len(found)):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure(served: Served, steps: int) -> dict[str, float]:
    import tinker

    service = tinker.ServiceClient(base_url=served.env["TINKER_BASE_URL"], api_key=served.env["TINKER_API_KEY"])
    calls = {"step_s": train(service), "sample_s": sample(service)}
    found: dict[str, float] = {}
    for name, call in calls.items():
        call()
        found[f"{name} alone"] = timed(call, lambda count: count == steps)
    over = threading.Event()
    beside: dict[str, float] = {}

    def without_pause() -> None:
        beside["sample_s"] = timed(calls["sample_s"], lambda count: count > 0 and over.is_set())

    thread = threading.Thread(target=without_pause)
    thread.start()
    beside["step_s"] = timed(calls["step_s"], lambda count: count == steps)
    over.set()
    thread.join()
    service.close()
    return {**found, **{f"{name} beside": value for name, value in beside.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {}
    for backend in given.backend or ["hf", "vllm"]:
        with tempfile.TemporaryDirectory() as name:
            write_model(Path(name), **SIZES)
            with serving(Path(name), "--backend", backend) as served:
                found[backend] = measure(served, given.steps)
    if given.json:
        print(json.dumps(found))
        return
    names = [*next(iter(found.values()))]
    rows = [[backend, *(f"{row[name]:.2f}" for name in names)] for backend, row in found.items()]
    print_table("median seconds", ["engine", *names], rows)


if __name__ == "__main__":
    main()
