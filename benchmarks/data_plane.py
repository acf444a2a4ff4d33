"""What the driver does in one GRPO step: its CPU seconds and memory, with engines and ranks that do nothing.

    python benchmarks/data_plane.py --samples 1024 --tokens 1024 --ranks 64
    python benchmarks/data_plane.py --samples 16384 --tokens 4096 --ranks 1024 --repeats 1

``step``: the real ``GRPOTrainer.train_step`` with reference log-probs. Completions and answers of ranks are serialised
as Ray does it (cloudpickle with protocol 5) outside the clock and deserialised inside it; shards are cut and serialised
into a store inside it, and a call that refers to them takes a reference for each rank. ``gather``: the real
``RayWorkerGroup`` waits for as many answers in Ray's own store, with handles that stand for ranks. Networks, actors and
real tokenizers are left out: ``--decode`` names what a tokenizer's share is (a model folder): it grows with the text.

The driver's memory is the peak of its resident memory above what it held before the step, results in the store included
(they are held for the driver), shards sent to ranks and what stays with them excluded.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pickle
import pstats
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _common import limit_threads, machine, print_table

THREADS = limit_threads()

import numpy  # noqa: E402  after the thread limit
import torch  # noqa: E402
from nemorl.base.process.timing import Timer  # noqa: E402
from nemorl.contracts.workers import Composed  # noqa: E402
from nemorl.metrics import Sum  # noqa: E402
from nemorl.resources.policies import TrainingPolicy  # noqa: E402
from nemorl.types import Completion, GenerationRequest  # noqa: E402
from ray import cloudpickle  # noqa: E402
from scale import MIB, _forget_peak, _memory  # noqa: E402

GENERATIONS = 16
PROMPT_TOKENS = 64
VOCABULARY = 150_000
REFERENCE = bytes(28)
"""As long as an ``ObjectID`` of Ray."""
REPLICA_RANKS = 8
"""Ranks of one replica of the generator."""


class FakeTokenizer:
    """The ``transformers`` tokenizer of a text whose characters nobody reads."""

    eos_token_id = 2
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        seed = int(text)
        return {"input_ids": [1000 + (seed * 31 + place) % VOCABULARY for place in range(PROMPT_TOKENS)]}

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return f"{len(token_ids)} tokens"


class Engines:
    """Replicas of a generator: each answers with random tokens, pickled as they leave a worker's process."""

    def __init__(self, replicas: int, tokens: int, complete: Callable[..., Completion]) -> None:
        self.data_parallel_size, self._tokens, self._complete = replicas, tokens, complete
        self.worker_s = 0.0

    def scatter(self, verb: Any, shards: Sequence[Sequence[GenerationRequest]], *args: Any) -> list[Any]:
        began_s = time.process_time()
        answers = [
            as_stored([[self._sampled(seed) for seed in request.seeds] for request in shard]) for shard in shards
        ]
        self.worker_s += time.process_time() - began_s
        return [pickle.loads(body, buffers=buffers) for body, buffers in answers]

    def call(self, *_: Any) -> list[Any]:
        return [None] * self.data_parallel_size

    def shutdown(self) -> None: ...

    def _sampled(self, seed: int) -> Completion:
        rng = numpy.random.default_rng(seed % 2**32)
        size = int(self._tokens * rng.uniform(0.5, 1.5)) - PROMPT_TOKENS
        ids = rng.integers(3, VOCABULARY, size)
        return self._complete(ids, -rng.random(size, numpy.float32))


class Trainers:
    """Data-parallel ranks of a trainer; their answers depend on their tokens alone, so that numbers can be compared."""

    def __init__(self, ranks: int) -> None:
        self.data_parallel_size = ranks
        self._store = numpy.ones(256 * MIB, numpy.uint8)
        self.worker_s = 0.0
        self.sent_bytes = 0

    def put(self, values: Sequence[Any]) -> list[Callable[[], Any]]:
        for shard in values:  # each is made when asked for
            self._send(shard)
        return [partial(values.__getitem__, rank) for rank in range(len(values))]

    def scatter(self, verb: Any, shards: Composed[Any], *args: Any) -> list[Any]:
        return self.read(self.scatter_kept(verb, shards, *args))

    def scatter_kept(self, verb: Any, shards: Composed[Any], *args: Any) -> list[Callable[[], Any]]:
        self._send((shards.make, args))  # one copy for all ranks
        for _ in range(len(shards)):
            self._send((verb.__name__, [REFERENCE for _ in shards.parts]))
        return [partial(self._answer, verb.__name__, shards, rank) for rank in range(len(shards))]

    def read(self, references: Sequence[Callable[[], Any]]) -> list[Any]:
        began_s = time.process_time()
        answers = [as_stored(reference()) for reference in references]
        self.worker_s += time.process_time() - began_s
        return [pickle.loads(body, buffers=buffers) for body, buffers in answers]

    def shutdown(self) -> None: ...

    def _send(self, shard: Any) -> None:
        buffers: list[Any] = []
        body = cloudpickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
        for part in [memoryview(body), *(buffer.raw() for buffer in buffers)]:
            start = self.sent_bytes % (len(self._store) // 2)
            room = min(part.nbytes, len(self._store) - start)
            numpy.copyto(self._store[start : start + room], numpy.frombuffer(part, numpy.uint8)[:room])
            self.sent_bytes += part.nbytes

    @staticmethod
    def _answer(method: str, shards: Composed[Any], rank: int) -> Any:
        batch = shards.make(*(part[rank]() for part in shards.parts))
        if method == "get_logprobs":
            return -(batch.token_ids % 1009).float() / 1009
        weighted = {name: float((values * batch.loss_weights).sum()) for name, values in batch.token_fields.items()}
        return {"num_tokens": Sum(batch.num_tokens)} | {name: Sum(value) for name, value in weighted.items()}


def as_stored(value: Any) -> tuple[bytes, list[bytes]]:
    """A value as it lies in Ray's store."""
    buffers: list[Any] = []
    body = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return body, [bytes(buffer.raw()) for buffer in buffers]


def completion(ids: Any, logprobs: Any) -> Completion:
    """What an engine of ours hands over."""
    from nemorl_tensors.numbers import Numbers

    return Completion(Numbers(ids.astype(numpy.int32)).declared, Numbers(logprobs).declared, "stop")


def trainer_of(samples: int, engines: Engines, trainers: Trainers, decode: Path | None) -> Any:
    """A GRPO trainer whose workers are these."""
    from nemorl_grpo import GRPOConfig
    from nemorl_grpo.trainer import GRPOTrainer
    from nemorl_rl.data.tokenizer import Tokenizer
    from nemorl_rl.environments import EnvironmentPool
    from nemorl_rl.environments.functions import RewardFunction
    from nemorl_rl.rollouts.engine import RolloutEngine
    from nemorl_rl.serving.generation_policy import GenerationPolicy

    config = GRPOConfig(
        model="none",
        num_prompts_per_step=samples // GENERATIONS,
        num_generations_per_prompt=GENERATIONS,
        num_minibatches=1,
        num_epochs_per_rollout=2,
        kl_penalty=0.01,
        policy={"max_sequence_tokens": 1_000_000},
    )
    trainer = GRPOTrainer(config)
    trainer.tokenizer = Tokenizer.load(str(decode)) if decode else Tokenizer(FakeTokenizer())
    hooks = SimpleNamespace(fire=lambda *_, **__: None)
    trainer.run = SimpleNamespace(policy=TrainingPolicy(trainers), timer=Timer(), hooks=hooks)
    # A reward of the text's length, with a spread within each group.
    pool = EnvironmentPool(RewardFunction(lambda prompt, response: float(sum(map(ord, response[-12:])) % 7)))
    trainer.generation = GenerationPolicy(engines)
    trainer.rollouts = RolloutEngine(
        trainer.generation, pool, trainer.tokenizer, max_sequence_tokens=1_000_000, timer=trainer.run.timer
    )
    trainer.sync_weights = lambda: None
    trainer.setup()
    return trainer


def one_step(samples: int, tokens: int, ranks: int, *, decode: Path | None, profile: bool) -> dict[str, Any]:
    """One step of the driver."""
    engines = Engines(max(1, ranks // REPLICA_RANKS), tokens, completion)
    trainers = Trainers(ranks)
    trainer = trainer_of(samples, engines, trainers, decode)
    rows = [{"prompt": str(number)} for number in range(samples // GENERATIONS)]
    gc.collect()
    _forget_peak()
    held, began_s = _memory("VmRSS"), time.process_time()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    metrics = trainer.train_step(rows)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    cpu_s = time.process_time() - began_s - engines.worker_s - trainers.worker_s
    peak = _memory("VmHWM") - held
    numbers = {name: metric.value for name, metric in sorted(metrics.items())}
    trainer.rollouts.environments.close()
    return {
        "samples": samples,
        "tokens": int(numbers["total_num_tokens"]),
        "ranks": ranks,
        "cpu_s": cpu_s,
        "peak_gib": peak / 2**30,
        "phases": {name: round(seconds, 2) for name, seconds in trainer.run.timer.drain().items()},
        "numbers": numbers,
    }


def gather(ranks: int, copies: int, values: int = 65_536) -> dict[str, Any]:
    """A call of a group of ``ranks`` that hold ``copies`` of a model: the driver's CPU seconds and the bytes that it
    reads, beside Ray's own store. Its actors are handles that have answered already."""
    import threading

    import ray
    from nemorl.contracts import TrainingBackend
    from nemorl.resources.ray_actor import WorkerFacts
    from nemorl.resources.ray_answers import Answers
    from nemorl.resources.ray_ranks import GroupSettings, Rank
    from nemorl.resources.ray_workers import RayWorkerGroup

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=2 * 2**30)
    answer, read, worker_s = numpy.zeros(values, numpy.float32), [0], [0.0]

    class Actor:
        def __init__(self) -> None:
            self.invoke = SimpleNamespace(remote=self._invoke)

        def _invoke(self, role: str, method: str, kwargs: Any, logs: Any, *args: Any, answers: bool, **_: Any) -> Any:
            began_s = time.thread_time()
            read[0] += answers * answer.nbytes
            reference = ray.put(answer if answers else None)
            worker_s[0] += time.thread_time() - began_s
            return reference

    group = RayWorkerGroup.__new__(RayWorkerGroup)
    shards = tuple(rank % copies for rank in range(ranks))
    group.settings, group._size, group._answers = GroupSettings(shards=shards), ranks, Answers(600.0, None)
    group._order = threading.Lock()
    group._ranks = [Rank(n, group.settings, Actor(), WorkerFacts("nowhere", "", 0), (), 0) for n in range(ranks)]
    parts = [numpy.zeros(values, numpy.float32)] * copies
    group.scatter(TrainingBackend.get_logprobs, parts, "policy")
    read[0], worker_s[0], began_s = 0, 0.0, time.process_time()
    group.scatter(TrainingBackend.get_logprobs, parts, "policy")
    cpu_s = time.process_time() - began_s - worker_s[0]
    ray.shutdown()
    return {"ranks": ranks, "copies": copies, "cpu_s": cpu_s, "answer_mib": read[0] / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=lambda text: [int(part) for part in text.split(",")], default=[1024])
    parser.add_argument("--tokens", type=int, default=1024, help="mean length of a sequence")
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[64])
    parser.add_argument("--gather", action="store_true", help="the leg that waits for ranks, beside Ray")
    parser.add_argument("--decode", type=Path, help="a model folder whose tokenizer decodes")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    print(machine(THREADS))
    if options.gather:
        waits = [gather(ranks, max(1, ranks // copies)) for ranks in options.ranks for copies in (1, 32)]
        rows = [
            (str(row["ranks"]), str(row["copies"]), f"{row['cpu_s']:.3f}", f"{row['answer_mib']:.0f}") for row in waits
        ]
        print_table("Driver, one call beside Ray", ("ranks", "copies", "CPU s", "MiB read"), rows)
        return
    found = [
        one_step(samples, options.tokens, ranks, decode=options.decode, profile=options.profile)
        for samples in options.samples
        for ranks in options.ranks
    ]
    print_table(
        "Driver, one step",
        ("samples", "tokens", "ranks", "CPU s", "us / token", "GiB", "bytes / token"),
        [
            (
                f"{row['samples']:,}",
                f"{row['tokens']:,}",
                str(row["ranks"]),
                f"{row['cpu_s']:.2f}",
                f"{1e6 * row['cpu_s'] / row['tokens']:.3f}",
                f"{row['peak_gib']:.2f}",
                f"{row['peak_gib'] * 2**30 / row['tokens']:.0f}",
            )
            for row in found
        ],
    )
    for row in found:
        print(row["phases"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
