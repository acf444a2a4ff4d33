"""Weights from sharded trainers to engines over several devices: in pieces, by gathering, and against one memcpy.

    python benchmarks/spread_sync.py --repeats 7 --json
    python benchmarks/spread_sync.py --layouts 2x2 --layers 2

``RxE``: R ranks of ``dtensor`` (FSDP2 over gloo) send, E processes of an engine read, each its part of every matrix
(rows e of E, as a column-parallel layer holds them) into memory of its own. ``pieces``: each rank publishes its boxes,
each reader copies its slices. ``whole``: rank 0 gathers tensor by tensor and publishes the model, of which readers copy
the same slices. ``copy``: one memcpy in every reader of as many bytes as it needs, all at the same time. From the first
byte to the last reader; all three take turns; medians. ``cpu_s`` adds up the CPU seconds of all processes, which a
loaded machine changes less. Weights have SmolLM2-135M's shape and are random.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table

THREADS = limit_threads()

TRANSPORT = "nemorl-rl:shared_memory"
WARM_UP = 2
ANSWER_S = 240.0
SIZES: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def send(pipe: Connection, rank: int, ranks: int, port: int, folder: str) -> None:
    """A rank of the trainer: publishes when it is told how."""
    import torch
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext, WorkerHost
    from nemorl_dtensor.config import DTensorConfig

    torch.set_num_threads(1)
    context = WorkerContext(rank=rank, world_size=ranks, master_port=port)
    policy = PolicyConfig(model_name=folder, init="random", precision="bfloat16")
    host = WorkerHost(lambda worker: DTensorConfig().build(policy, worker, reference=False), context)
    pipe.send("ready")
    while (how := pipe.recv()) is not None:
        (way, version), start_s = how, time.process_time()
        sent = host.worker.publish_pieces(TRANSPORT) if way == "pieces" else host.publish(TRANSPORT, version)
        pipe.send((sent, time.process_time() - start_s))
    pipe.send("done")


def read(pipe: Connection, reader: int, readers: int) -> None:
    """A process of an engine: copies its part of every tensor."""
    import torch

    torch.set_num_threads(1)
    own: dict[str, torch.Tensor] = {}
    spare: dict[str, torch.Tensor] = {}
    pipe.send("ready")
    while (handle := pipe.recv()) is not None:
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        if handle == "copy":
            for name, tensor in own.items():
                spare[name].copy_(tensor)
        else:
            for name, part in _parts(handle.buckets(), reader, readers):
                if name not in own:
                    own[name], spare[name] = torch.zeros(part.shape, dtype=part.dtype), torch.zeros_like(part)
                own[name].copy_(part)
        end_s, cpu_s = time.monotonic(), time.process_time() - start_cpu_s  # processes share the first clock
        pipe.send((start_s, end_s, cpu_s, float(sum(t.double().sum() for t in list(own.values())[:3]))))


def _parts(buckets: Iterable[Any], reader: int, readers: int) -> Iterator[tuple[str, Any]]:
    for bucket in buckets:
        for name, tensor in bucket.items():
            is_divided = tensor.ndim == 2 and len(tensor) % readers == 0
            yield name, tensor.chunk(readers)[reader] if is_divided else tensor


class Processes:
    """Senders or readers, and what they answer."""

    def __init__(self, function: Any, arguments: list[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in arguments]
        self.pipes = [here for here, _ in pairs]
        self.processes = [
            context.Process(target=function, args=(there, *given), daemon=True)
            for (_, there), given in zip(pairs, arguments, strict=True)
        ]
        for process in self.processes:
            process.start()
        self.answers()

    def tell(self, message: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(message)
        return self.answers()

    def answers(self) -> list[Any]:
        for pipe in self.pipes:
            if not pipe.poll(ANSWER_S):
                raise TimeoutError(f"a process ended, or did not answer within {ANSWER_S:.0f} s")
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def measure(folder: Path, ranks: int, readers: int, repeats: int) -> dict[str, float]:
    """Median seconds of one layout."""
    from nemorl.resources.ports import free_port
    from nemorl_tensors.engines.pieces import SpreadHandle

    port = free_port()
    senders = Processes(send, [(rank, ranks, port, str(folder)) for rank in range(ranks)])
    receivers = Processes(read, [(reader, readers) for reader in range(readers)])
    seconds: dict[str, list[float]] = {
        f"{way}_{kind}": [] for way in ("pieces", "whole", "copy") for kind in ("s", "cpu_s")
    }
    sums: set[float] = set()
    for version in range(repeats + WARM_UP):
        for way in ("pieces", "whole"):
            start_s, start_cpu_s = time.monotonic(), time.process_time()
            sent, sent_cpu_s = zip(*senders.tell((way, version)), strict=True)
            handle = SpreadHandle(TRANSPORT, version, sent) if way == "pieces" else sent[0]
            _, ends_s, read_cpu_s, found = zip(*receivers.tell(handle), strict=True)
            own_cpu_s = time.process_time() - start_cpu_s
            sums.add(found[0])
            seconds[f"{way}_s"].append(max(ends_s) - start_s)
            seconds[f"{way}_cpu_s"].append(sum(sent_cpu_s) + sum(read_cpu_s) + own_cpu_s)
        begins_s, ends_s, copy_cpu_s, _ = zip(*receivers.tell("copy"), strict=True)
        seconds["copy_s"].append(max(end_s - begin_s for begin_s, end_s in zip(begins_s, ends_s, strict=True)))
        seconds["copy_cpu_s"].append(sum(copy_cpu_s))
    assert len(sums) == 1, f"the ways brought different weights: {sums}"
    for group in (senders, receivers):
        group.close()
    medians = {name: statistics.median(each[WARM_UP:]) for name, each in seconds.items()}
    ratios = {
        "copies": medians["pieces_s"] / medians["copy_s"],
        "cpu_copies": medians["pieces_cpu_s"] / medians["copy_cpu_s"],
        "gain": medians["whole_s"] / medians["pieces_s"],
    }
    return {**medians, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="1x1,2x1,2x2,4x2", help="ranks x processes of the engine, e.g. 2x2,4x2")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one last line of JSON")
    options = parser.parse_args()
    from nemorl_rl.models.tiny import write_tiny_model

    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(Path(name), architecture="llama", **{**SIZES, "num_hidden_layers": options.layers})
        for layout in options.layouts.split(","):
            ranks, readers = map(int, layout.split("x"))
            results[layout] = measure(folder, ranks, readers, options.repeats)
    rows = [[layout, *(f"{value:.3f}" for value in found.values())] for layout, found in results.items()]
    print_table("Seconds of one sync, and its memcpys", ["layout", *next(iter(results.values()))], rows)
    if options.json:
        print(json.dumps({"machine": machine(), "threads": THREADS, "results": results}))


if __name__ == "__main__":
    main()
