"""What a receipt costs beside the sync that it is about: digests by the trainer and by the engine, and the probe.

    python benchmarks/weight_receipts.py --engine hf --json
    python benchmarks/weight_receipts.py --engine vllm --precision bfloat16

The model has SmolLM2-135M's shape and random weights, the transport is ``shared_memory``, and trainer and
engine take turns in one process. A sync is the trainer's ``publish`` and the engine's ``update_weights``;
with a receipt both digest every tensor, and the driver compares. Processor seconds, for a machine that others
use too; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table
from weight_sync import SMALL, SMOLLM2_135M, Trainer, _policy

THREADS = limit_threads()
ENGINES = ("hf", "megatron", "vllm")


class Engine:
    """An engine that gets the trainer's weights over shared memory."""

    def __init__(self, name: str, folder: Path, precision: str) -> None:
        from nemorl.config import GenerationConfig
        from nemorl.plugins import registry
        from nemorl.resources.worker import WorkerContext
        from nemorl.weights import transport

        backend = registry().load("generation_backends", name)()
        policy = _policy(folder, precision, max_sequence_tokens=256)
        self.sender = transport("shared_memory")
        self.engine: Any = backend.build(GenerationConfig(), policy, WorkerContext(), None)

    def sync(self, export: Any, version: int, *, receipt: bool) -> dict[str, float]:
        """Processor seconds of the parts of one sync."""
        from nemorl.weights import WeightHandle
        from nemorl_rl.serving.receipts import Sent, compare
        from nemorl_tensors.engines.digests import digested

        found: dict[str, float] = {}

        def timed(name: str, do: Callable[[], Any]) -> Any:
            start_s = time.process_time()
            result = do()
            found[name] = time.process_time() - start_s
            return result

        export, digests = digested(export) if receipt else (export, None)
        payload = timed("publish", lambda: self.sender.publish(export))
        handle = WeightHandle("shared_memory", version, payload, digests=digests)
        timed("update", lambda: self.engine.update_weights(handle, version))
        if digests is not None:
            held = timed("answer", lambda: self.engine.held_digests(list(digests)))
            told = timed("compare", lambda: compare(Sent(version, dict(digests)), [held]))
            assert told.is_proven, told
        return found


def measure(name: str, folder: Path, precision: str, repeats: int) -> dict[str, Any]:
    """Medians, in seconds."""
    trainer, engine = Trainer(folder, precision), Engine(name, folder, precision)
    plain: list[float] = []
    proven: list[float] = []
    parts: list[dict[str, float]] = []
    for number in range(2 * (repeats + 2)):
        trainer.step(number + 1)
        found = engine.sync(trainer.export, number + 1, receipt=bool(number % 2))
        if number < 4:
            continue  # pages and caches are new
        (proven if number % 2 else plain).append(sum(found.values()))
        parts += [found] if number % 2 else []
    engine.engine.shutdown()
    sync_s, cost_s = statistics.median(plain), statistics.median(proven) - statistics.median(plain)
    of_parts = {part: statistics.median(found[part] for found in parts) for part in parts[0]}
    return {
        "engine": name, "precision": precision, "bytes": trainer.size, "sync_s": sync_s, "receipt_s": cost_s,
        "share_of_each_sync": cost_s / sync_s, "one_sync_in": max(1, round(cost_s / sync_s / 0.03)), "with": of_parts,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="hf")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a small model, for a trial run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from nemorl_testing.models import tiny_model

    folder = tiny_model(**(SMALL if options.small else SMOLLM2_135M))
    found = measure(options.engine, folder, options.precision, options.repeats)
    if options.json:
        print(json.dumps({"machine": machine(THREADS), **found}))
        return
    shown = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in found.items()}
    print_table("Receipts", ["what", "value"], [list(row) for row in shown.items()])


if __name__ == "__main__":
    main()
