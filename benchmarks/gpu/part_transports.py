"""Weights from one process to another: seconds from ``publish`` until the receiver has read them, beside one copy; and
the same with a digest of every tensor on both sides, which must agree.

Both processes use the same GPU, so ``nccl``, which refuses that, runs only where there are two.
"""

from __future__ import annotations

import multiprocessing
import statistics
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
    """The other process: fetches what it is told of, and answers with its digests, or with the sum of last elements."""
    from nemorl.weights import transport
    from nemorl_tensors.engines.digests import digests

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    receiver = transport(transport_name)
    own: dict[str, torch.Tensor] = {}
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        payload, is_proven = told
        try:
            for bucket in receiver.fetch(payload):
                for name, tensor in bucket.items():
                    if name not in own:
                        own[name] = torch.empty_like(tensor, device=device)
                    own[name].copy_(tensor)
            synchronize()
            pipe.send(digests(own) if is_proven else sum(float(tensor.view(-1)[-1]) for tensor in own.values()))
        except Exception as error:
            pipe.send(error)


def answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"the receiver did not answer within {ANSWER_S:.0f} s")
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def sync_s(
    name: str, weights: Mapping[str, torch.Tensor], devices: tuple[str, str], *, is_proven: bool = False
) -> list[float]:
    """Seconds of each sync, the first not counted; with a receipt if asked for."""
    from nemorl.weights import transport
    from nemorl_tensors.engines.buckets import in_buckets
    from nemorl_tensors.engines.digests import digested

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
            through, digests = digested(export) if is_proven else (export, None)
            here.send((sender.publish(through), is_proven))
            found = answer(here)
            times.append(time.monotonic() - start_s)
            if found != (number * len(weights) if digests is None else digests):
                raise RuntimeError(f"what arrived of version {number} is not what was sent")
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
                middle_s = statistics.median(sync_s(name, weights, devices))
                proven_s = statistics.median(sync_s(name, weights, devices, is_proven=True))
                found = {"s": round(middle_s, 5), "gb_s": round(total / middle_s / 1e9, 2)}
                found |= {"copies": round(middle_s / copy_s, 2), "with_receipt_s": round(proven_s, 5)}
                options.figures.add(f"{size}, {name}", found)


if __name__ == "__main__":
    main()
