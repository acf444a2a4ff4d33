"""Bytes and seconds of a weight sync that carries only what has changed, beside one of all weights, in one run.

    python examples/smollm2/prepare.py
    python benchmarks/delta_sync.py --model models/SmolLM2-135M-Instruct --json
    python benchmarks/delta_sync.py --model models/SmolLM2-135M-Instruct --precisions float32 --rates 1e-6

The model learns by AdamW (betas 0.9 and 0.999, eps 1e-8, no decay, gradients clipped to norm 1, no warm-up) on float32
masters; its loss is a policy gradient over random sums, each right or wrong answer with an advantage of +1 or -1. After
every step all weights are sent in the sent precision, over ``delta_socket`` to an engine in another process of this
machine: as changes, then as a whole to one that has none, and, as the least that a whole sync can take, as bare bytes
over a TCP connection, which nobody checks. The engine's digests of each are compared with the trainer's.

The floor is the entropy of what has changed: for each tensor which elements did, and what is xored to these, coded
without knowledge of their neighbours. Medians over steps; the first, whose moments are empty, is not counted. Each step
is a line of JSON before the tables.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _common import limit_threads, machine, print_table

THREADS = limit_threads()

ANSWER_S = 300.0
"""Longest wait for the other process."""
WARM_UP = 1
LINKS = {"1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9}
"""Bytes a second, of links that seconds are computed for."""
BETAS, EPS, CLIP = (0.9, 0.999), 1e-8, 1.0
WAYS = ("changes", "whole", "bare")


class Trainer:
    """A causal model that learns by policy gradients, and is sent in another precision."""

    def __init__(self, folder: Path, precision: str, rate: float, tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.dtype, self.tokens = getattr(torch, precision), tokens
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=BETAS, eps=EPS, weight_decay=0.0)
        self.draw = random.Random(0)

    def step(self) -> float:
        """One update. Returns the loss."""
        import torch

        rows, count = [], 0
        while count < self.tokens:
            a, b, wrong = self.draw.randrange(100), self.draw.randrange(100), self.draw.random() < 0.5
            answer = a + b + (self.draw.randrange(1, 9) if wrong else 0)
            ids = self.tokenizer(f"Question: what is {a} + {b}? Answer: {answer}.", return_tensors="pt").input_ids
            rows.append((ids, -1.0 if wrong else 1.0))
            count += ids.numel()
        self.optimizer.zero_grad()
        total = 0.0
        for ids, advantage in rows:
            logprobs = self.model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
            loss = -(advantage * logprobs).sum() / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return total

    def sent(self) -> dict[str, Any]:
        """What is sent: each parameter once, tied ones under one name."""
        return {name: parameter.detach().to(self.dtype) for name, parameter in self.model.named_parameters()}


def in_buckets_of(tensors: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    from nemorl_tensors.engines.buckets import in_buckets

    return in_buckets(({name: tensor}, tensor.nbytes) for name, tensor in tensors.items())


def engine(pipe: Connection) -> None:
    """The other process. Answers each request with digests, bytes read, wall and processor seconds."""
    import torch
    from nemorl_rl.transports.delta.bases import Bases
    from nemorl_rl.transports.delta.socket import DeltaSocket
    from nemorl_tensors.engines.buckets import CountedBuckets
    from nemorl_tensors.engines.digests import digests

    torch.set_num_threads(THREADS)
    known = Bases()
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        way, payload = message
        start_s, cpu_s = time.perf_counter(), time.process_time()
        found: dict[str, Any] = {}
        if way == "bare":
            held, nbytes = received(payload), payload[1]
        else:
            bases = known if way == "changes" else Bases()
            counted = CountedBuckets(DeltaSocket(ANSWER_S, bases).fetch(payload))
            found = {name: tensor for bucket in counted for name, tensor in bucket.items()}
            held, nbytes = None, counted.nbytes
        took = time.perf_counter() - start_s, time.process_time() - cpu_s
        pipe.send((digests(found), nbytes, *took, None if held is None else int(held.sum(dtype="uint64"))))


def received(payload: tuple[int, int]) -> Any:
    """Bytes of a connection, in memory."""
    import numpy

    port, size = payload
    target, done = numpy.empty(size, numpy.uint8), 0
    with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection:
        while done < size:
            done += connection.recv_into(memoryview(target)[done:])
    return target


class BareSender:
    """All tensors over a connection, one after the other."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        from nemorl_rl.transports.layout import bytes_of

        self._parts = [bytes_of(tensor) for tensor in tensors.values()]
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.payload = self._listening.getsockname()[1], sum(len(part) for part in self._parts)
        self.sum = sum(int(part.sum(dtype="uint64")) for part in self._parts)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        with connection, self._listening:
            for part in self._parts:
                connection.sendall(memoryview(part))


def floor_bytes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[int, float]:
    """Elements that have changed, and bytes that an order-0 code of these and of their xored bits takes at least.

    For a tensor of n elements, k of which changed: n H(k / n) + k H(values), in bits.
    """
    import numpy
    from nemorl_rl.transports.layout import bytes_of

    changed, bits = 0, 0.0
    for name, tensor in new.items():
        word = f"<u{tensor.dtype.itemsize}"
        xored = bytes_of(old[name]).view(word) ^ bytes_of(tensor).view(word)
        values = xored[xored != 0]
        n, k = len(xored), len(values)
        changed += k
        if k > 0:
            counts = numpy.unique(values, return_counts=True)[1] / k
            bits += k * float(-(counts * numpy.log2(counts)).sum())
            share = k / n
            bits += 0.0 if k == n else -n * (share * numpy.log2(share) + (1 - share) * numpy.log2(1 - share))
    return changed, bits / 8


def uncoded_bytes(kept: Any) -> int:
    """What the newest changes would take without Huffman codes."""
    from nemorl_rl.transports.delta.changes import _HEAD

    runs = [
        run
        for planes in kept._versions[-1].planes.values()
        for plane in planes or ()
        for run in (plane.places, plane.values)
        if run
    ]
    return sum(_HEAD.size + _HEAD.unpack_from(run)[1] for run in runs)


def run_case(folder: Path, precision: str, rate: float, steps: int, tokens: int) -> dict[str, Any]:
    """One learning rate: a record per step, and medians."""
    from nemorl_rl.transports.delta.socket import DeltaSocket
    from nemorl_tensors.engines.digests import digests

    trainer = Trainer(folder, precision, rate, tokens)
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=engine, args=(there,), daemon=True)
    process.start()
    answer(pipe)
    sender, records = DeltaSocket(ANSWER_S), []
    old = trainer.sent()
    fetch(pipe, "changes", sender.publish(lambda: in_buckets_of(old)))
    for number in range(1, steps + 1):
        loss = trainer.step()
        new = trainer.sent()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        payload = sender.publish(lambda new=new: in_buckets_of(new))  # type: ignore[misc]
        record: dict[str, Any] = {"step": number, "loss": loss, "publish_s": time.perf_counter() - start_s}
        record["publish_cpu_s"] = time.process_time() - cpu_s
        bare = BareSender(new)
        for way in WAYS:
            cpu_s = time.process_time()
            found, nbytes, wall_s, their_cpu_s, checksum = fetch(pipe, way, bare.payload if way == "bare" else payload)
            mine_s = time.process_time() - cpu_s
            assert checksum == bare.sum if way == "bare" else found == digests(new), f"{way}: other bits than were sent"
            record |= {f"{way}_bytes": nbytes, f"{way}_s": wall_s, f"{way}_cpu_s": mine_s + their_cpu_s}
        changed, record["floor_bytes"] = floor_bytes(old, new)
        record["changed_frac"] = changed / sum(tensor.numel() for tensor in new.values())
        record["uncoded_bytes"] = uncoded_bytes(sender._server._kept)  # type: ignore[union-attr]
        records.append(record)
        print(json.dumps({"rate": rate, "precision": precision, **record}), flush=True)
        old = new
    fallbacks = sender.publish(lambda: in_buckets_of(old)).counts.fallbacks
    pipe.send(None)
    process.join(ANSWER_S)
    sender.close()
    counted = records[WARM_UP:] or records
    medians = {key: statistics.median(each[key] for each in counted) for key in counted[0] if key != "step"}
    return {"rate": rate, "precision": precision, "fallbacks": fallbacks, "medians": medians, "steps": records}


def fetch(pipe: Connection, way: str, payload: Any) -> Any:
    pipe.send((way, payload))
    return answer(pipe)


def answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"the engine's process did not answer within {ANSWER_S:.0f} s")
    return pipe.recv()


def print_cases(cases: Sequence[Mapping[str, Any]]) -> None:
    def mb(nbytes: float) -> str:
        return f"{nbytes / 1e6:.2f}"

    rows = []
    for case in cases:
        m = case["medians"]
        rows.append(
            (f"{case['rate']:g}", case["precision"], f"{m['changed_frac']:.2%}", mb(m["whole_bytes"]),
             mb(m["uncoded_bytes"]), mb(m["changes_bytes"]), f"{m['whole_bytes'] / m['changes_bytes']:.1f}",
             mb(m["floor_bytes"]), f"{m['changes_bytes'] / m['floor_bytes']:.3f}")
        )  # fmt: skip
    columns = ("rate", "sent as", "changed", "whole MB", "uncoded MB", "changes MB", "whole / changes", "floor MB",
               "changes / floor")  # fmt: skip
    print_table("Bytes of a sync", columns, rows)
    rows = []
    for case in cases:
        m = case["medians"]
        local = (m["publish_s"], m["changes_s"], m["whole_s"], m["bare_s"])
        far = [
            f"{m['publish_s'] + m['changes_s'] + m['changes_bytes'] / link:.2f} / "
            f"{m['bare_s'] + m['bare_bytes'] / link:.2f}"
            for link in LINKS.values()
        ]
        processor = f"{m['publish_cpu_s'] + m['changes_cpu_s']:.2f} / {m['bare_cpu_s']:.2f}"
        rows.append((f"{case['rate']:g}", case["precision"], *(f"{each:.2f}" for each in local), processor, *far))
    columns = ("rate", "sent as", "publish s", "changes s", "whole s", "bare s", "processor s, changes / bare",
               *(f"computed at {name}, changes / bare" for name in LINKS))  # fmt: skip
    print_table("Seconds of a sync, on this machine", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; unset: a tiny random one, for a trial run")
    parser.add_argument("--rates", default="1e-6,1e-5")
    parser.add_argument("--precisions", default="bfloat16")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(THREADS)
    print(machine(THREADS))
    with tempfile.TemporaryDirectory() as name:
        folder = options.model
        if folder is None:
            from _common import write_model

            folder = write_model(Path(name) / "tiny")
        cases = [
            run_case(folder, precision, float(rate), options.steps, options.tokens)
            for precision in options.precisions.split(",")
            for rate in options.rates.split(",")
        ]
    print_cases(cases)
    if options.json:
        print(json.dumps({"machine": machine(THREADS), "cases": cases}))


if __name__ == "__main__":
    main()
