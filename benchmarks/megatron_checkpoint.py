"""Checkpoints of two data-parallel megatron ranks: ours beside ``torch_dist`` with ``fully_reshardable`` state.

    python benchmarks/megatron_checkpoint.py --rounds 3

Each round starts two processes per side, in turn. They train one step, save and load. Measured: wall seconds of saving
and loading, and by how much a rank's peak of memory grows over both. megatron-core 0.16 cannot give what it read to
torch's AdamW (``KeyError: 'step'``), so its side only reads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table, start_side

THREADS = limit_threads()
SIDES = ("nemorl", "torch_dist")
RANKS = 2
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
    "singleton_local_shards": True,
}


def torch_dist(backend: Any) -> tuple[Callable[[Path], None], Callable[[Path], None]]:
    """Saving and loading as a program over megatron-core does it."""
    from megatron.core import dist_checkpointing

    model, optimizer = backend._pieces[0], backend._optimizer._optimizer

    def sharded(*, is_loading: bool) -> dict[str, Any]:
        weights = model.sharded_state_dict(metadata=dict(METADATA))
        return {
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(METADATA)),
        }

    def save(path: Path) -> None:
        dist_checkpointing.save(sharded(is_loading=False), str(path))

    def load(path: Path) -> None:
        dist_checkpointing.load(sharded(is_loading=True), str(path))

    return save, load


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_rank(side: str, rank: int, port: int, model: Path, folder: Path, results: Any) -> None:
    """One rank of one side; puts its figures into ``results``."""
    start_side(THREADS)
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl_testing.batches import WeightedNLL, ragged_batch

    policy = PolicyConfig.model_validate(
        {"model_name": str(model), "init": "random", "backend": "megatron", "optimizer": {"lr": 1e-9}}
    )
    worker = WorkerContext(rank=rank, world_size=RANKS, master_port=port)
    backend = policy.backend.build(policy, worker, reference=False)
    backend.train_step(ragged_batch(), WeightedNLL())
    save, load = (backend.save_checkpoint, backend.load_checkpoint) if side == "nemorl" else torch_dist(backend)
    found: dict[str, float] = {}
    memory = peak_mib()
    for name, call in {"save": save, "load": load}.items():
        start = time.perf_counter()
        call(folder)
        found[name] = time.perf_counter() - start
    found["memory"] = peak_mib() - memory
    results.put(found)
    backend.shutdown()


def run_side(side: str, port: int, model: Path) -> dict[str, float]:
    """The slower rank's seconds, the larger growth of memory, and the folder's size."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=run_rank, args=(side, rank, port, model, Path(folder), results))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = [results.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 2**20
    return {name: max(one[name] for one in found) for name in found[0]} | {"size": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    from nemorl_rl.models.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder), **SIZES)
        for round_ in range(arguments.rounds):
            for number, side in enumerate(SIDES):
                figures[side].append(run_side(side, 29700 + 2 * round_ + number, model))
    rows = []
    for name, unit in {"save": "s", "load": "s", "memory": "MiB", "size": "MiB"}.items():
        ours, theirs = (statistics.median(one[name] for one in figures[side]) for side in SIDES)
        rows.append([f"{name} [{unit}]", f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"])
    print_table(f"{RANKS} ranks, medians of {arguments.rounds}", ["", *SIDES, "ratio"], rows)


if __name__ == "__main__":
    main()
