"""How long new weights take from a trainer's process into a generator's, against one copy of the same bytes.

    python benchmarks/weight_sync.py --repeats 9 --json
    python benchmarks/weight_sync.py --transports shared_memory --precisions float32

The model has SmolLM2-135M's shape and random weights. A sync runs from the trainer's ``publish`` to the moment when all
parameters of the generator ``hf`` in another process are bound to the new weights. Then the generator reads every byte,
for it is there that a receiver of mapped memory pays for page faults; ``read`` is that, ``read own`` the same over
memory of its own. ``copy`` is one memcpy of as many bytes into touched memory. All three take turns; medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table

THREADS = limit_threads()

TRANSPORTS = ("in_process", "shared_memory", "object_store")
PRECISIONS = ("float32", "bfloat16")
WARM_UP = 3
"""Syncs not counted: the transports' two memory files and the store get their pages."""
BUCKET_BYTES = 256 * 2**20
"""Tensors travel in buckets of about this size."""
ANSWER_S = 120.0
"""Longest wait for the other process."""
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, Any] = {**SMOLLM2_135M, "vocab_size": 512, "hidden_size": 72, "num_hidden_layers": 2}
"""For a trial run."""


class Trainer:
    """Weights that change, exported as a training backend does: live tensors in buckets."""

    def __init__(self, folder: Path, precision: str) -> None:
        from nemorl_dtensor.model import load_model

        model = load_model(_policy(folder, precision, init="random"))
        self.tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.size = sum(tensor.nbytes for tensor in self.tensors.values())

    def step(self, number: int) -> None:
        """Every weight changes; the first of each tensor says in which step."""
        for tensor in self.tensors.values():
            tensor.mul_(1.001)
            tensor.view(-1)[0] = number

    def export(self) -> Iterator[Mapping[str, Any]]:
        bucket: dict[str, Any] = {}
        size = 0
        for name, tensor in self.tensors.items():
            bucket[name] = tensor
            size += tensor.nbytes
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = {}, 0
        yield bucket


class Generator:
    """The receiving half of the backend ``hf``."""

    def __init__(self, folder: Path, precision: str) -> None:
        import torch
        from nemorl_dtensor.generation_weights import empty_model
        from nemorl_dtensor.published_names import PublishedNames

        torch.set_num_threads(THREADS)
        self.model = empty_model(_policy(folder, precision), "cpu")
        self.names = PublishedNames(self.model)
        self._own: dict[str, Any] = {}

    def bind(self, handle: Any) -> float:
        """Returns when all parameters are bound, by the clock that processes share."""
        import torch
        from nemorl_dtensor.generation_weights import bind_weights

        bind_weights(self.model, self.names, handle, torch.device("cpu"))
        return time.monotonic()

    def read(self, number: int) -> tuple[float, float]:
        """Seconds to read every byte of the weights, then of a copy in this process's memory. Checks the step."""
        read_s = self._read_s([parameter.detach() for parameter in self.model.parameters()], number)
        for name, parameter in self.model.named_parameters():
            if name not in self._own:
                self._own[name] = parameter.detach().clone()
            self._own[name].copy_(parameter.detach())
        return read_s, self._read_s(list(self._own.values()), number)

    @staticmethod
    def _read_s(tensors: list[Any], number: int) -> float:
        import torch

        assert all(float(tensor.view(-1)[0]) == number for tensor in tensors), f"these are not the weights of {number}"
        start_s = time.perf_counter()
        for tensor in tensors:
            tensor.view(-1).view(torch.int32).amax()
        return time.perf_counter() - start_s


def _policy(folder: Path, precision: str, **more: Any) -> Any:
    from nemorl.config.models import PolicyConfig

    return PolicyConfig(model_name=str(folder), precision=precision, **more)


def receive(pipe: Connection, folder: Path, precision: str) -> None:
    """The generator's process: binds and reads what it is told of, until told ``None``."""
    generator = Generator(folder, precision)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        method, value = message
        pipe.send(getattr(generator, method)(value))


@dataclass
class OtherProcess:
    """A generator at the other end of a pipe."""

    pipe: Connection
    process: Any

    @classmethod
    def start(cls, folder: Path, precision: str) -> OtherProcess:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=receive, args=(there, folder, precision), daemon=True)
        process.start()
        there.close()
        other = cls(here, process)
        other._answer()
        return other

    def bind(self, handle: Any) -> float:
        self.pipe.send(("bind", handle))
        return float(self._answer())

    def read(self, number: int) -> tuple[float, float]:
        self.pipe.send(("read", number))
        read_s, own_s = self._answer()
        return read_s, own_s

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(ANSWER_S)

    def _answer(self) -> Any:
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError(f"the generator's process did not answer within {ANSWER_S:.0f} s")
        return self.pipe.recv()


class RayProcess:
    """The same generator as a Ray actor: the object store reaches only Ray's own processes."""

    def __init__(self, folder: Path, precision: str) -> None:
        import ray

        self._ray = ray
        self._actor = ray.remote(num_cpus=1)(Generator).remote(folder, precision)

    def bind(self, handle: Any) -> float:
        return float(self._ray.get(self._actor.bind.remote(handle), timeout=ANSWER_S))

    def read(self, number: int) -> tuple[float, float]:
        read_s, own_s = self._ray.get(self._actor.read.remote(number), timeout=ANSWER_S)
        return read_s, own_s

    def close(self) -> None:
        self._ray.kill(self._actor)


@dataclass
class Times:
    """Seconds of each counted sync of one transport."""

    publish: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    read_own: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        found = {f"{name}_s": statistics.median(seconds) for name, seconds in vars(self).items()}
        found["copies"] = found["sync_s"] / found["copy_s"]
        extra_s = found["read_s"] - found["read_own_s"]
        return {**found, "copies_with_read": (found["sync_s"] + extra_s) / found["copy_s"]}


def copier(size: int) -> Callable[[], float]:
    """Times one copy of ``size`` bytes between touched buffers."""
    import numpy

    source, target = numpy.ones(size, numpy.uint8), numpy.zeros(size, numpy.uint8)

    def copy() -> float:
        start_s = time.perf_counter()
        numpy.copyto(target, source)
        return time.perf_counter() - start_s

    return copy


def measure(name: str, trainer: Trainer, generator: Any, repeats: int) -> Times:
    """``repeats`` syncs over the transport ``name``, each of new weights, each beside one copy."""
    from nemorl.weights import WeightHandle, transport

    times, copy, sender = Times(), copier(trainer.size), transport(name)
    for number in range(1, WARM_UP + repeats + 1):
        trainer.step(number)
        copy_s = copy()
        start_s = time.monotonic()
        handle = WeightHandle(name, number, sender.publish(trainer.export))
        published_s = time.monotonic()
        bound_s = generator.bind(handle)
        read_s, own_s = generator.read(number)
        if number > WARM_UP:
            times.publish.append(published_s - start_s)
            times.sync.append(bound_s - start_s)
            times.read.append(read_s)
            times.read_own.append(own_s)
            times.copy.append(copy_s)
    sender.close()
    return times


def run_case(name: str, precision: str, folder: Path, repeats: int) -> dict[str, Any]:
    """One transport in one precision."""
    trainer = Trainer(folder, precision)
    if name == "in_process":
        found = measure(name, trainer, Generator(folder, precision), repeats)
    elif name == "object_store":
        from nemorl.config.cluster import ClusterConfig
        from nemorl.resources.ray_session import RaySession

        session = RaySession(ClusterConfig(launcher="ray"))
        try:
            found = measure(name, trainer, RayProcess(folder, precision), repeats)
        finally:
            session.close()
    else:
        other = OtherProcess.start(folder, precision)
        found = measure(name, trainer, other, repeats)
        other.close()
    return {"transport": name, "precision": precision, "mb": trainer.size / 1e6, **found.summary()}


def print_cases(cases: list[dict[str, Any]]) -> None:
    columns = (
        "transport", "precision", "MB", "copy ms", "publish ms", "sync ms", "sync / copy", "read ms", "read own ms",
        "with first read",
    )  # fmt: skip
    rows = [
        (case["transport"], case["precision"], f"{case['mb']:.0f}",
         *(f"{case[name] * 1e3:.1f}" for name in ("copy_s", "publish_s", "sync_s")), f"{case['copies']:.2f}",
         f"{case['read_s'] * 1e3:.1f}", f"{case['read_own_s'] * 1e3:.1f}", f"{case['copies_with_read']:.2f}")
        for case in cases
    ]  # fmt: skip
    print_table("Weight sync (with first read: adds what reading costs above reading own memory)", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a model of 0.2 M parameters, for a trial run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    import torch
    from transformers import LlamaConfig

    torch.set_num_threads(THREADS)
    print(machine(THREADS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaConfig(**SMALL if options.small else SMOLLM2_135M).save_pretrained(folder)
        cases = [
            run_case(transport, precision, folder, options.repeats)
            for precision in options.precisions.split(",")
            for transport in options.transports.split(",")
        ]
    print_cases(cases)
    if options.json:
        print(json.dumps({"machine": machine(THREADS), "cases": cases}))


if __name__ == "__main__":
    main()
