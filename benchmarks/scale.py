"""What the driver does per step as the ranks grow from 8 to 256, and what Ray adds to it on this machine.

    python benchmarks/scale.py --repeats 5 --json
    python benchmarks/scale.py --sequences 512 --tokens 1024 --legs simulated
    python benchmarks/scale.py --legs ray

``simulated``: ``TrainingPolicy.train_step`` and ``get_logprobs`` over workers that do nothing. Every shard is
serialised as Ray does it (cloudpickle with protocol 5, its buffers copied into a store) and every result is
deserialised; network and actors are left out. ``ray``: the same calls over real actors of this machine.

Times are medians, in seconds of the driver. ``copies`` divides by the time of one memcpy of the bytes sent, measured
in turn with the steps: the floor is one copy to line a rank's sequences up and one to send them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import limit_threads, machine, print_table, ragged

THREADS = limit_threads()

import numpy  # noqa: E402  after the thread limit
import torch  # noqa: E402
from nemorl.contracts.workers import Composed  # noqa: E402
from nemorl.metrics import Sum  # noqa: E402
from nemorl.resources.policies import TrainingPolicy  # noqa: E402
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss  # noqa: E402
from nemorl_tensors import TokenBatch  # noqa: E402
from nemorl_tensors.batch import loss_weights  # noqa: E402
from ray import cloudpickle  # noqa: E402

if TYPE_CHECKING:
    from nemorl.weights import WeightHandle

RANKS = (8, 32, 64, 128, 256)
VOCABULARY = 150_000
TRAIN_FIELDS = ("advantages", "generation_logprobs", "old_logprobs", "reference_logprobs")
"""[N] fields of a GRPO batch at ``train_step``; ``get_logprobs`` is asked before the last two exist."""
LOSS = ClippedPolicyGradientLoss(kl_penalty=0.01)
MIB = 2**20
REFERENCE_BYTES = 28
"""Of an ``ObjectID`` of Ray."""


def make_batch(sequences: int, mean_tokens: int, seed: int = 0) -> TokenBatch:
    """A ragged batch of ``sequences`` log-normal lengths with the given mean, and a GRPO step's token fields."""
    rng = torch.Generator().manual_seed(seed)
    lengths, mask = ragged(sequences, mean_tokens, rng)
    count = int(lengths.sum())
    ids = torch.randint(0, VOCABULARY, (count,), generator=rng)
    batch = TokenBatch(ids, lengths, mask, loss_weights(mask, lengths, "token"))
    return batch.with_tokens(**{name: torch.rand(count, generator=rng) for name in TRAIN_FIELDS})


def batch_bytes(batch: TokenBatch) -> int:
    return sum(tensor.nbytes for tensor in _tensors(batch))


def _tensors(batch: TokenBatch) -> list[torch.Tensor]:
    fixed = [batch.token_ids, batch.lengths, batch.mask, batch.loss_weights]
    return [*fixed, *batch.token_fields.values(), *batch.sequence_fields.values()]


@dataclass
class NothingWorkers:
    """A worker group (see ``nemorl.contracts.WorkerGroup``) that carries shards up to the door of a worker."""

    data_parallel_size: int
    store: memoryview
    """Stands for Ray's object store; its pages have been touched."""
    sent_bytes: int = 0
    cut_s: float = 0.0
    """Spent by the driver on making the shards that this group asked for."""
    send_s: float = 0.0
    """Spent by the driver on serialising them into the store."""
    receive_s: float = 0.0
    """Spent by the driver on deserialising results."""
    worker_s: float = 0.0
    """Spent here by what would be other processes."""
    peak_bytes: int = 0
    """Largest resident memory up to when all shards were sent."""
    results_bytes: int = 0
    """Held here by what would be the store."""

    def call(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [None] * self.data_parallel_size

    def put(self, values: Sequence[TokenBatch]) -> list[Callable[[], TokenBatch]]:
        clock = time.perf_counter
        for rank in range(len(values)):  # shards are made when asked for: each is let go before the next
            start_s = clock()
            shard = values[rank]
            cut_s = clock()
            self._send(shard)
            self.cut_s += cut_s - start_s
            self.send_s += clock() - cut_s
            del shard
        return [partial(values.__getitem__, rank) for rank in range(len(values))]

    def scatter(self, verb: Callable[..., Any], composed: Composed[TokenBatch], *args: Any) -> list[Any]:
        clock = time.perf_counter
        start_s = clock()
        self._send((composed.make, args))
        for _ in range(len(composed)):
            self._send(bytes(REFERENCE_BYTES))
        self.send_s += clock() - start_s
        self.peak_bytes = _memory("VmHWM")
        start_s = clock()
        shards = (composed.make(*(part[rank]() for part in composed.parts)) for rank in range(len(composed)))
        pickled = [cloudpickle.dumps(self._answer(verb.__name__, shard), protocol=5) for shard in shards]
        self.results_bytes = sum(len(data) for data in pickled)
        _forget_peak()
        answered_s = clock()
        results = [cloudpickle.loads(data) for data in pickled]
        self.worker_s = answered_s - start_s
        self.receive_s = clock() - answered_s
        return results

    def publish(self, transport: str, version: int) -> WeightHandle:
        raise NotImplementedError("these workers hold no weights")

    def shutdown(self) -> None:
        pass

    def _send(self, shard: Any) -> None:
        buffers: list[Any] = []
        body = cloudpickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
        for part in [memoryview(body), *(buffer.raw() for buffer in buffers)]:
            start = self.sent_bytes % len(self.store)
            room = min(part.nbytes, len(self.store) - start)
            numpy.copyto(numpy.frombuffer(self.store[start : start + room], numpy.uint8), _bytes(part)[:room])
            self.sent_bytes += part.nbytes

    @staticmethod
    def _answer(method: str, batch: TokenBatch) -> Any:
        if method == "get_logprobs":
            return -batch.token_ids.float()
        return {"loss": Sum(0.0), "num_tokens": Sum(batch.num_tokens)}


def _bytes(part: memoryview) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(part, numpy.uint8)


@dataclass
class Row:
    """One method at one number of ranks, over all repeats."""

    method: str
    ranks: int
    total_s: list[float] = field(default_factory=list)
    cut_s: list[float] = field(default_factory=list)
    send_s: list[float] = field(default_factory=list)
    receive_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    peak_bytes: int = 0
    """Largest private memory of the driver during a step, above what it held before (the batch itself)."""

    def summary(self) -> dict[str, Any]:
        median = statistics.median
        return {
            "method": self.method,
            "ranks": self.ranks,
            "driver_s": median(self.total_s),
            "cut_s": median(self.cut_s),
            "send_s": median(self.send_s),
            "receive_s": median(self.receive_s),
            "copy_s": median(self.copy_s),
            "copies": median(self.total_s) / median(self.copy_s),
            "sent_mib": self.sent_bytes / MIB,
            "peak_mib": self.peak_bytes / MIB,
        }


def simulate(batch: TokenBatch, ranks: Sequence[int], repeats: int) -> list[Row]:
    """Drive all numbers of ranks in turn, ``repeats`` times."""
    total = batch_bytes(batch)
    store = numpy.ones(total + 64 * MIB, numpy.uint8)
    early = {name: batch[name] for name in TRAIN_FIELDS[:2]}
    before_update = TokenBatch(batch.token_ids, batch.lengths, batch.mask, batch.loss_weights, token_fields=early)
    calls: dict[str, Callable[[TrainingPolicy], Any]] = {
        "train_step": lambda policy: policy.train_step(replace(batch, places=[]), LOSS),
        "get_logprobs": lambda policy: policy.get_logprobs(replace(before_update, places=[])),
    }
    rows = {(method, count): Row(method, count) for method in calls for count in ranks}
    for repeat in range(repeats + 1):  # the first is not counted
        for (method, count), row in rows.items():
            workers = NothingWorkers(count, memoryview(store))
            _forget_peak()
            held = _memory("VmRSS")
            start_s = time.perf_counter()
            result = calls[method](TrainingPolicy(workers))
            seconds = time.perf_counter() - start_s - workers.worker_s
            peak = max(workers.peak_bytes, _memory("VmHWM") - workers.results_bytes) - held
            if repeat == 0:
                _require_right(method, result, batch)
                continue
            row.total_s.append(seconds)
            row.cut_s.append(workers.cut_s)
            row.send_s.append(workers.send_s)
            row.receive_s.append(workers.receive_s)
            row.sent_bytes, row.peak_bytes = workers.sent_bytes, max(row.peak_bytes, peak)
            del result
            row.copy_s.append(_copy_s(store, workers.sent_bytes))
    return list(rows.values())


def _require_right(method: str, result: Any, batch: TokenBatch) -> None:
    if method == "get_logprobs":
        assert torch.equal(result, -batch.token_ids.float()), "log-probs came back in another order"
    else:
        assert result["num_tokens"].value == batch.num_tokens, "the shards do not add up to the batch"


def _copy_s(store: numpy.ndarray[Any, Any], size: int) -> float:
    """Seconds to copy ``size`` bytes once between touched buffers."""
    source = numpy.ones(size, numpy.uint8)
    start_s = time.perf_counter()
    numpy.copyto(store[:size], source)
    return time.perf_counter() - start_s


def _forget_peak() -> None:
    """Start the peak of this process's resident memory anew, without what the allocator merely keeps (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    """Bytes of a line of this process's status: ``VmRSS`` now, ``VmHWM`` at its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {name}"
    return int(found[1]) * 1024


class Sink:
    """A backend behind a real actor that does nothing."""

    def __init__(self, context: Any) -> None:
        pass

    def ignore(self, arrays: Any) -> None:
        pass

    def train_step(self, batch: TokenBatch, loss: Any) -> Any:
        from nemorl.metrics import Sum

        return {"num_tokens": Sum(batch.num_tokens)}

    def get_logprobs(self, batch: TokenBatch, weights: str) -> Any:
        return -batch.token_ids.float()

    def shutdown(self) -> None:
        pass


def over_ray(mebibytes: int, repeats: int, ranks: int = 2) -> dict[str, float]:
    """Steps over real actors and ``ray.put`` of the same bytes, in turn: median seconds of each."""
    import ray
    from nemorl.config.cluster import ClusterConfig
    from nemorl.resources.ray_cluster import RayVirtualCluster
    from nemorl.resources.ray_ranks import GroupSettings
    from nemorl.resources.ray_workers import RayWorkerGroup

    whole = make_batch(64, 1000)
    batch = make_batch(64, round(1000 * mebibytes * MIB / batch_bytes(whole)))
    data = numpy.ones(batch_bytes(batch), numpy.uint8)
    cluster = RayVirtualCluster([ranks], ClusterConfig(launcher="ray"))
    settings = GroupSettings(name="sinks", is_spmd=False)
    try:
        group = RayWorkerGroup(cluster, Sink, settings=settings)
        policy = TrainingPolicy(group)
        shards = [batch.select(shard) for shard in batch.shards(ranks)]
        arrays = [tuple(tensor.numpy() for tensor in _tensors(shard)) for shard in shards]
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: ray.put(data),
            "arrays": lambda: group.scatter(Sink.ignore, arrays),
            "scatter": lambda: group.scatter(Sink.train_step, shards, LOSS),
            "train_step": lambda: policy.train_step(replace(batch, places=[]), LOSS),
            "get_logprobs": lambda: policy.get_logprobs(replace(batch, places=[])),
        }
        _require_right("train_step", calls["train_step"](), batch)
        _require_right("get_logprobs", calls["get_logprobs"](), batch)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(repeats + 2):  # the first two warm the store up
            for name, call in calls.items():
                start_s = time.perf_counter()
                kept = call()
                elapsed_s = time.perf_counter() - start_s
                del kept
                if repeat >= 2:
                    seconds[name].append(elapsed_s)
        group.shutdown()
    finally:
        cluster.shutdown()
    return {"mib": batch_bytes(batch) / MIB, **{name: statistics.median(found) for name, found in seconds.items()}}


def print_simulated(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("call", "ranks", "driver s", "cut", "send", "receive", "one copy", "copies", "sent MiB", "peak MiB")
    seconds = ("driver_s", "cut_s", "send_s", "receive_s", "copy_s")
    table = [
        (row["method"], str(row["ranks"]), *(f"{row[name]:.3f}" for name in seconds), f"{row['copies']:.1f}",
         f"{row['sent_mib']:,.0f}", f"{row['peak_mib']:,.0f}")
        for row in rows
    ]  # fmt: skip
    print_table("Driver, per step", columns, table)
    for method in dict.fromkeys(row["method"] for row in rows):
        times = [row["driver_s"] for row in rows if row["method"] == method]
        print(f"{method}: x{times[-1] / times[0]:.2f} from {rows[0]['ranks']} to {rows[-1]['ranks']} ranks")


def print_ray(found: dict[str, float], ranks: int = 2) -> None:
    rows = [(name, f"{found[name] * 1e3:.1f}", f"{found[name] / found['put']:.2f}") for name in found if name != "mib"]
    title = (
        f"Ray, {ranks} actors, {found['mib']:.0f} MiB (put: ray.put of as many bytes as one array; arrays: the tensors "
        "of the shards as bare numpy arguments)"
    )
    print_table(title, ("call", "ms", "/ put"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192, help="mean length of a sequence")
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=list(RANKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--legs", default="simulated,ray", help="simulated, ray, or both")
    parser.add_argument("--ray-mib", type=int, default=64, help="size of the batch of the ray leg")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = {"machine": machine(THREADS)}
    print(result["machine"])
    if "simulated" in options.legs:
        batch = make_batch(options.sequences, options.tokens)
        lengths = batch.lengths
        print(f"{len(batch)} sequences, {batch.num_tokens / 1e6:.1f} M tokens, lengths {int(lengths.min())} to "
              f"{int(lengths.max())}, {batch_bytes(batch) / MIB:,.0f} MiB")  # fmt: skip
        result["simulated"] = [row.summary() for row in simulate(batch, options.ranks, options.repeats)]
        print_simulated(result["simulated"])
        del batch
    if "ray" in options.legs:
        result["ray"] = over_ray(options.ray_mib, 4 * options.repeats)
        print_ray(result["ray"])
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
