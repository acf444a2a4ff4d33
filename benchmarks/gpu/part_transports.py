"""Weights from one process to another: seconds from ``publish`` until the receiver has read them, beside one copy.

Both processes use the same GPU, so ``nccl``, which refuses that, runs only where there are two.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from _figures import parse, seconds, synchronize
from _models import SMOLLM2_1_7B, SMOLLM2_135M, TINY, Shape

ANSWER_S = 30.0
"""Longest wait for the other process."""
REPEATS = 5
BUCKET_BYTES = 256 * 2**20


def tensors(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    """Of the sizes of a model's matrices, in bfloat16."""
    d, f, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_size
    layer = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}
    sizes = {f"layers.{index}.{name}": size for index in range(shape.num_hidden_layers) for name, size in layer.items()}
    sizes["embedding"] = (shape.vocab_size, d)
    return {name: torch.zeros(size, dtype=torch.bfloat16, device=device) for name, size in sizes.items()}


def receive(pipe: Connection, transport_name: str, device: str) -> None:
    """The other process: fetches what it is told of, and answers with the sum of its first elements."""
    from nemorl.weights import transport

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    receiver = transport(transport_name)
    own: dict[str, torch.Tensor] = {}
    pipe.send("ready")
    while (payload := pipe.recv()) is not None:
        try:
            for bucket in receiver.fetch(payload):
                for name, tensor in bucket.items():
                    if name not in own:
                        own[name] = torch.empty_like(tensor, device=device)
                    own[name].copy_(tensor)
            synchronize()
            pipe.send(sum(float(tensor.view(-1)[-1]) for tensor in own.values()))
        except Exception as error:
            pipe.send(error)


def answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"the receiver did not answer within {ANSWER_S:.0f} s")
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def sync_s(name: str, weights: Mapping[str, torch.Tensor], devices: tuple[str, str]) -> list[float]:
    """Seconds of each sync, the first not counted."""
    from nemorl.weights import transport
    from nemorl_tensors.engines.buckets import in_buckets

    def export() -> Iterator[Mapping[str, torch.Tensor]]:
        yield from in_buckets((({key: tensor}, tensor.nbytes) for key, tensor in weights.items()), BUCKET_BYTES)

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there, name, devices[1]), daemon=True)
    process.start()
    sender, times = transport(name), []
    try:
        answer(here)
        for number in range(1, REPEATS + 2):
            for tensor in weights.values():
                tensor.fill_(number)
            synchronize()
            start_s = time.monotonic()
            here.send(sender.publish(export))
            found = answer(here)
            times.append(time.monotonic() - start_s)
            if found != number * len(weights):
                raise RuntimeError(f"the weights of version {number} sum to {found}, not {number * len(weights)}")
    finally:
        process.kill()
        process.join()
        sender.close()
    return times[1:]


def main() -> None:
    options = parse()
    gpus = torch.cuda.device_count() if options.is_cuda else 0
    pairs = {"cuda_ipc": (options.device,) * 2, "shared_memory": (options.device,) * 2}
    if not options.is_cuda:
        pairs = {"shared_memory": ("cpu", "cpu"), "nccl": ("cpu", "cpu")}  # the latter over gloo
    elif gpus > 1:
        pairs["nccl"] = ("cuda:0", "cuda:1")
    sizes = {"tiny": TINY} if options.small else {"135M": SMOLLM2_135M, "1.7B": SMOLLM2_1_7B}
    for size, shape in sizes.items():
        weights = tensors(shape, options.device)
        total = sum(tensor.nbytes for tensor in weights.values())
        copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        copy_s = seconds(lambda copies=copies, weights=weights: [copies[n].copy_(t) for n, t in weights.items()])
        options.figures.add(f"{size}: bytes", total)
        options.figures.add(f"{size}: one copy", {"s": copy_s, "gb_s": round(total / copy_s / 1e9, 1)})
        del copies
        for name, devices in pairs.items():
            with options.figures.case(f"{size}, {name}"):
                times = sorted(sync_s(name, weights, devices))
                middle_s = times[len(times) // 2]
                found = {"s": round(middle_s, 5), "gb_s": round(total / middle_s / 1e9, 2)}
                options.figures.add(f"{size}, {name}", {**found, "copies": round(middle_s / copy_s, 2)})


if __name__ == "__main__":
    main()
