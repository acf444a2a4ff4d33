"""For how long a checkpoint stops training: written at once, written meanwhile, and one copy of the same bytes.

    python benchmarks/checkpoint_saves.py --hidden 512 --layers 8 --rounds 7
    python benchmarks/checkpoint_saves.py --device cuda:0 --hidden 2048 --layers 16 --precision bfloat16 --rounds 5

Sides take turns round by round, in one process, on the same backend after one step of AdamW:

- ``sync``: `save_checkpoint`, and the hashes and flushes of the manifest, as a run does it.
- ``async``: `snapshot_checkpoint`, and publishing when the thread is done, which is waited for outside the clock.
- ``memcpy``: the copies of the same tensors into memory that was used before; page-locked where they come from a GPU.

Then the step itself: alone, and while a thread writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import limit_threads, print_table, start_side

THREADS = limit_threads()
GIB = 2**30


def built(arguments: argparse.Namespace, folder: Path) -> Any:
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl_rl.models.tiny import write_tiny_model

    hidden = arguments.hidden
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": arguments.layers}
    model = write_tiny_model(folder / "model", num_attention_heads=8, num_key_value_heads=8, **sizes)
    policy = PolicyConfig.model_validate(
        {"model_name": str(model), "init": "random", "precision": arguments.precision, "optimizer": {"lr": 1e-6}}
    )
    return policy.backend.build(policy, WorkerContext(device=arguments.device), reference=False)


def seconds(action: Callable[[], object], device: str) -> float:
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


class Copies:
    """The floor: every tensor of a checkpoint, copied to memory of its own that was used before."""

    def __init__(self, backend: Any, device: str) -> None:
        import torch

        files = backend.checkpoint_files(optimizer=True).tensors.values()
        self._sources = [tensor for file in files for tensor in file.tensors.values()]
        lock = device.startswith("cuda")
        self._places = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=lock and t.is_cuda) for t in self._sources]
        self.bytes = sum(tensor.nbytes for tensor in self._sources)

    def make(self) -> None:
        for place, source in zip(self._places, self._sources, strict=True):
            place.copy_(source, non_blocking=True)


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], int]:
    from nemorl.base.files.saving import Draft
    from nemorl_testing.batches import WeightedNLL, ragged_batch

    backend, batch, loss = built(arguments, folder), ragged_batch(), WeightedNLL()
    backend.train_step(batch, loss)
    copies = Copies(backend, arguments.device)
    found: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> float:
        took = seconds(action, arguments.device)
        found.setdefault(name, []).append(took)
        return took

    def step() -> None:
        backend.train_step(batch, loss)

    def cleared(name: str) -> Path:
        shutil.rmtree(folder / name, ignore_errors=True)
        return folder / name

    def sync() -> None:
        Draft(folder / "sync", {}, {"policy": backend.save_checkpoint}, {}).publish(wait=True)

    def begin() -> None:
        drafts.append(
            Draft(folder / "async", {}, {"policy": backend.snapshot_checkpoint}, {}, [backend.snapshot_files])
        )

    drafts: list[Draft] = []
    timed("first copy", begin)
    drafts.pop().publish(wait=True)
    for _ in range(arguments.rounds):
        cleared("async")
        timed("memcpy", copies.make)
        copy = timed("async: copy", begin)
        timed("step while writing", step)
        timed("rest of writing", lambda: backend.snapshot_files(wait=True))
        publish = timed("async: publish", lambda: drafts.pop().publish(wait=True))
        found.setdefault("async", []).append(copy + publish)
        cleared("sync")
        timed("sync", sync)
        timed("step", step)
    backend.shutdown()
    return found, copies.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--precision", default="float32")
    parser.add_argument(
        "--folder", type=Path, help="Where checkpoints are written. Unset: the folder for temporary files."
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start_side(THREADS)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found, size = measure(arguments, Path(folder))
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = [a / b for a, b in zip(found["async"], found["memcpy"], strict=True)]
    gains = [a / b for a, b in zip(found["sync"], found["async"], strict=True)]
    facts = {
        "gib": size / GIB,
        **medians,
        "async / memcpy": statistics.median(ratios),
        "sync / async": statistics.median(gains),
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    print_table(
        f"seconds, {arguments.device}", ("what", "figure"), [(name, f"{value:.4f}") for name, value in facts.items()]
    )


if __name__ == "__main__":
    main()
