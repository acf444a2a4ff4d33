"""Transports of changes: what arrives is what was published to the last bit, whatever happens on the way.

Each engine of these tests has bases of its own, as a process has.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nemorl.errors import BackendError, UsageError, WeightsLostError
from nemorl_rl.transports.delta.bases import IDLE_FETCHES, Base, Bases
from nemorl_rl.transports.delta.changes import DamageError, Plane, apply, changes
from nemorl_rl.transports.delta.folder import DeltaFolder
from nemorl_rl.transports.delta.socket import DeltaSocket, SocketPayload
from nemorl_rl.transports.delta.versions import KeptVersions
from nemorl_tensors.engines.buckets import CountedBuckets
from recorded_messages import Raises
from torch import Tensor

PATIENCE_S = 60.0

Weights = dict[str, Tensor]


# What has changed


def changed(old: Tensor, new: Tensor) -> list[Plane]:
    """Planes that lead from one to the other; checks that they do, and back."""
    before, after = as_bytes(old), as_bytes(new)
    kept = before.copy()
    planes = changes(kept, after, old.dtype.itemsize)
    assert (kept == after).all()
    apply(planes, kept, old.dtype.itemsize)
    assert (kept == before).all()
    apply(planes, kept, old.dtype.itemsize)
    assert (kept == after).all()
    return planes


def as_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_a_step_of_bfloat16_by_one_unit_takes_a_byte_of_place_and_one_of_value() -> None:
    old = torch.full((1000,), 1.0, dtype=torch.bfloat16)  # 0x3f80
    new = old.clone()
    new[[3, 4, 260, 999]] = 1.0078125  # 0x3f81: the lowest bit
    low, high = changed(old, new)
    # Skipped before each: 3, 0, 255, 738. 255 = 255 + 0 and 738 = 2 * 255 + 228: 3, 0, 255 0, 255 255 228.
    assert (low.form, low.changed, list(low.places[9:])) == ("gaps1", 4, [3, 0, 255, 0, 255, 255, 228])
    assert list(low.values[9:]) == [1, 1, 1, 1]
    assert (high.form, high.nbytes) == ("same", 0)


def test_the_form_of_a_plane_is_the_one_of_fewest_bytes() -> None:
    count = 80_000  # a bitmap takes 10 000 bytes
    old = torch.zeros(count, dtype=torch.uint8)

    def form(step: int) -> tuple[str, int]:
        new = old.clone()
        new[::step] = 1
        (plane,) = changed(old, new)
        return plane.form, plane.changed

    assert form(80_001) == ("gaps1", 1)
    assert form(10_000) == ("gaps2", 8)  # gaps of 9999: 40 bytes each in units of 255, and 2 in units of 65 535
    assert form(100) == ("gaps1", 800)
    assert form(5) == ("bitmap", 16_000)
    assert form(1) == ("all", 80_000)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.05, 0.4, 0.7, 1.0])
def test_any_change_leads_there_and_back(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(7)
    for count in (0, 1, 9, 5_000):
        bits = torch.randint(0, 256, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
        other = torch.randint(0, 256, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
        moved = torch.rand(count, generator=generator) < share
        new = torch.where(moved[:, None], other, bits)
        changed(bits.reshape(-1).view(dtype), new.reshape(-1).view(dtype))  # of random bits some are NaN


def test_a_not_a_number_and_a_negative_zero_keep_their_bits() -> None:
    old = torch.tensor([0x0000, 0x7FC0, 0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    new = torch.tensor([-0x8000, 0x7FC1, 0x7FC0, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    low, high = changed(old, new)  # 0.0 to -0.0 differs in the highest bit, and NaNs in their lowest
    assert (low.changed, high.changed) == (2, 1)


def test_a_small_update_of_float32_leaves_its_upper_bytes_out() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(50_000, generator=generator)
    new = old + 1e-6 * torch.randn(50_000, generator=generator)
    planes = changed(old, new)
    assert planes[0].form == "all"
    assert planes[3].nbytes < 2_000  # exponents
    assert sum(plane.nbytes for plane in planes) < 0.6 * old.nbytes


@pytest.mark.parametrize(
    "broken",
    [
        Plane("gaps1", 2, b"\0" + struct.pack("<Q", 1) + b"\3", b"\0" + struct.pack("<Q", 2) + b"\1\1"),
        Plane("gaps1", 1, b"\0" + struct.pack("<Q", 1) + b"\x40", b"\0" + struct.pack("<Q", 1) + b"\1"),
        Plane("gaps1", 1, b"\0" + struct.pack("<Q", 1) + b"\3", b"\0" + struct.pack("<Q", 2**60) + b"\1"),
        Plane("gaps1", 1, b"\1" + struct.pack("<Q", 9) + b"\xff\xff", b"\0" + struct.pack("<Q", 1) + b"\1"),
        Plane("all", 8, b"", b"\0" + struct.pack("<Q", 3) + b"\1\1\1"),
        Plane("all", 8, b"", b""),
        Plane("unheard", 1, b"", b""),  # type: ignore[arg-type]
    ],
    ids=["a place too few", "beyond the end", "a size that is a lie", "no code", "too short", "nothing", "a form"],
)
def test_damaged_changes_are_refused(broken: Plane) -> None:
    with pytest.raises(DamageError):
        apply([broken], np.zeros(8, dtype=np.uint8), 1)


# Versions and bases


def export(weights: Mapping[str, Tensor]) -> Callable[[], Iterator[Mapping[str, Tensor]]]:
    def buckets() -> Iterator[Mapping[str, Tensor]]:
        names = list(weights)
        yield {name: weights[name] for name in names[:2]}
        yield {name: weights[name] for name in names[2:]}

    return buckets


def model(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(40, 16, generator=generator).bfloat16()
    return {
        "embed": embedding,
        "layer.weight": torch.randn(16, 16, generator=generator).bfloat16(),
        "norm": torch.randn(16, generator=generator),
        "scale": torch.tensor(0.5),
        "head": embedding,  # tied
    }


def nudged(weights: Weights, generator: torch.Generator, share: float) -> Weights:
    """A share of the elements of every tensor moved by a unit in the last place."""
    found = {}
    for name, tensor in weights.items():
        words = tensor.clone().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)
        moved = torch.rand(words.shape, generator=generator) < share
        found[name] = (words + moved.to(words.dtype)).view(tensor.dtype)
    return found


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    if left.keys() != right.keys():
        return False
    return all(
        (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape)
        and (as_bytes(left[name]) == as_bytes(right[name])).all()
        for name in left
    )


def read(message: Any) -> BytesIO:
    return BytesIO(b"".join(map(bytes, message.parts)))


def test_a_base_follows_the_sender_through_many_versions_and_shapes() -> None:
    kept, base, generator = KeptVersions(), Base(), torch.Generator().manual_seed(3)
    weights = model()
    for number in range(1, 25):
        weights = nudged(weights, generator, (0.0, 0.01, 0.3, 1.0)[number % 4])
        if number == 6:
            weights["lora_A"] = torch.randn(4, 16, generator=generator)  # comes in a later version
        if number == 9:
            weights["norm"] = weights["norm"].bfloat16()
        if number == 12:
            weights["layer.weight"] = torch.randn(8, 16, generator=generator).bfloat16()
        if number == 15:
            del weights["head"]
        assert kept.publish(export(weights)) == number
        message = kept.message(number, base.number)
        assert (message.is_whole, message.why) == (number == 1, "")
        assert base.take(read(message), number) == message.nbytes
        assert same_bits(base.tensors, weights)


def test_the_version_before_is_made_of_the_newest_by_changing_it_back() -> None:
    kept, generator = KeptVersions(), torch.Generator().manual_seed(5)
    first = model()
    second = nudged(first, generator, 0.1)
    second["norm"] = torch.randn(7, generator=generator)  # no changes lead back to it
    del second["scale"]
    kept.publish(export(first))
    kept.publish(export(second))
    for number, weights in ((1, first), (2, second), (1, first)):
        base = Base()
        base.take(read(kept.message(number, None)), number)
        assert same_bits(base.tensors, weights)


def test_a_version_can_be_read_while_the_next_is_taken_in() -> None:
    kept, generator = KeptVersions(), torch.Generator().manual_seed(5)
    first = model()
    second = nudged(first, generator, 0.2)
    kept.publish(export(first))
    read_meanwhile: list[BytesIO] = []

    def buckets() -> Iterator[Mapping[str, Tensor]]:
        for bucket in export(second)():
            yield bucket
            read_meanwhile.append(read(kept.message(1, None)))

    kept.publish(buckets)
    for message in read_meanwhile:
        base = Base()
        base.take(message, 1)
        assert same_bits(base.tensors, first)


def test_a_sender_whose_export_failed_sends_whole_weights_next() -> None:
    kept, base, generator = KeptVersions(), Base(), torch.Generator().manual_seed(5)
    weights = model()
    kept.publish(export(weights))
    base.take(read(kept.message(1, None)), 1)

    def fails() -> Iterator[Mapping[str, Tensor]]:
        yield {"embed": torch.zeros(40, 16, dtype=torch.bfloat16)}
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        kept.publish(fails)
    number = kept.publish(export(weights := nudged(weights, generator, 0.1)))
    message = kept.message(number, base.number)
    assert message.is_whole
    base.take(read(message), number)
    assert same_bits(base.tensors, weights)


def test_any_flipped_bit_of_a_message_is_noticed() -> None:
    kept, generator = KeptVersions(), torch.Generator().manual_seed(5)
    weights = {"a": torch.randn(6, 5, generator=generator).bfloat16(), "b": torch.randn(8, generator=generator)}
    kept.publish(export(weights))
    first = read(kept.message(1, None)).getvalue()
    kept.publish(export(nudged(weights, generator, 0.2)))
    message = read(kept.message(2, 1)).getvalue()
    noticed = 0
    for place in range(len(message)):
        base = Base()
        base.take(BytesIO(first), 1)
        damaged = bytearray(message)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(DamageError):
            base.take(BytesIO(bytes(damaged)), 2)
        noticed += base.number is None or base.number == 1
    assert noticed == len(message)
    for length in range(0, len(message), 7):
        base = Base()
        base.take(BytesIO(first), 1)
        with pytest.raises(DamageError):
            base.take(BytesIO(message[:length]), 2)


# Both transports


@pytest.fixture(params=["socket", "folder"])
def make(request: pytest.FixtureRequest, weights_folder: Path) -> Callable[[], Any]:
    """One end, with bases of its own."""
    kind = DeltaSocket if request.param == "socket" else DeltaFolder
    return lambda: kind(PATIENCE_S, Bases())


def fetched(engine: Any, payload: Any) -> tuple[Weights, int]:
    """Weights, and bytes that were read."""
    counted = CountedBuckets(engine.fetch(payload))
    found = {name: tensor for bucket in counted for name, tensor in bucket.items()}
    return found, counted.nbytes


def held(engine: Any, payload: Any) -> Base:
    base: Base = engine._bases.of(payload.sender)
    return base


def test_engines_follow_a_sender_bit_for_bit_and_a_late_one_gets_a_base(make: Any) -> None:
    sender, engines, generator = make(), [make(), make()], torch.Generator().manual_seed(1)
    weights, size = model(), sum(tensor.nbytes for tensor in model().values())
    for number in range(1, 8):
        weights = nudged(weights, generator, 0.02)
        payload = pickle.loads(pickle.dumps(sender.publish(export(weights))))
        if number == 4:
            engines.append(make())
        for place, engine in enumerate(engines):
            found, nbytes = fetched(engine, payload)
            assert same_bits(found, weights)
            is_first = number == (4 if place == 2 else 1)
            assert (nbytes > size) == is_first
    counts = sender.publish(export(weights)).counts
    assert (counts.fallbacks, counts.why) == (0, "")
    sender.close()


def test_what_an_engine_does_to_its_weights_does_not_reach_the_base(make: Any) -> None:
    sender, engine, generator = make(), make(), torch.Generator().manual_seed(1)
    weights = model()
    found, _ = fetched(engine, sender.publish(export(weights)))
    for tensor in found.values():
        tensor.zero_()
    weights = nudged(weights, generator, 0.02)
    payload = sender.publish(export(weights))
    assert same_bits(fetched(engine, payload)[0], weights)
    assert sender.publish(export(weights)).counts.fallbacks == 0
    sender.close()


def flip(base: Base) -> None:
    base.tensors["layer.weight"].view(torch.int16)[3, 4] ^= 1


def swap(base: Base) -> None:
    base.tensors["embed"], base.tensors["head"] = base.tensors["head"], base.tensors["embed"]
    base.tensors["embed"].view(torch.int16)[0] += 1


def lose(base: Base) -> None:
    del base.tensors["norm"]


def restart(base: Base) -> None:
    base.tensors, base.number = {}, None


def fall_behind(base: Base) -> None:
    base.number = 1


@pytest.mark.parametrize(
    ("fault", "named"),
    [(flip, "layer.weight"), (swap, "embed"), (lose, "norm"), (fall_behind, "version 1"), (restart, "")],
)
def test_an_engine_with_another_base_gets_the_whole_weights_and_the_sender_says_why(
    make: Any, fault: Callable[[Base], None], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sender, engine, generator = make(), make(), torch.Generator().manual_seed(1)
    weights = model()
    for _ in range(2):
        fetched(engine, sender.publish(export(weights := nudged(weights, generator, 0.02))))
    payload = sender.publish(export(weights := nudged(weights, generator, 0.02)))
    fault(held(engine, payload))
    found, nbytes = fetched(engine, payload)
    assert same_bits(found, weights)
    assert nbytes > sum(tensor.nbytes for tensor in weights.values())
    payload = sender.publish(export(weights := nudged(weights, generator, 0.02)))
    assert payload.counts.fallbacks == bool(named)
    assert named in payload.counts.why
    assert capfd.readouterr().err.count("nemorl:") == bool(named)
    assert (payload.remark() is not None) == bool(named)
    assert payload.metrics()["weight_sync_fallbacks"].value == bool(named)
    found, nbytes = fetched(engine, payload)  # healed
    assert same_bits(found, weights)
    assert nbytes < sum(tensor.nbytes for tensor in weights.values())
    sender.close()


def test_of_another_senders_weights_an_engine_takes_nothing_over(make: Any) -> None:
    first, second, engine = make(), make(), make()
    assert same_bits(fetched(engine, first.publish(export(model(1))))[0], model(1))
    assert same_bits(fetched(engine, second.publish(export(model(2))))[0], model(2))
    assert len(engine._bases._by_sender) == 2
    first.close()
    for _ in range(IDLE_FETCHES):
        fetched(engine, second.publish(export(model(2))))
    assert len(engine._bases._by_sender) == 1  # what the first has sent is dropped
    second.close()


def test_weights_of_a_sender_that_is_gone_are_lost(make: Any, raises: Raises) -> None:
    sender, engine = make(), make()
    payload = sender.publish(export(model()))
    sender.close()
    with raises(WeightsLostError):
        fetched(engine, payload)


def test_a_version_that_is_two_behind_is_not_to_be_had(make: Any, raises: Raises) -> None:
    sender, engine = make(), make()
    payload = sender.publish(export(model()))
    for _ in range(2):
        sender.publish(export(model()))
    with raises(BackendError, 1, 3):
        fetched(engine, payload)
    sender.close()


def test_several_engines_are_served_while_the_trainer_publishes(make: Any) -> None:
    sender, engines = make(), [make() for _ in range(4)]
    weights = model()
    payload = sender.publish(export(weights))
    found: list[Weights] = [{} for _ in engines]

    def fetch(place: int) -> None:
        found[place] = fetched(engines[place], payload)[0]

    threads = [threading.Thread(target=fetch, args=(place,)) for place in range(len(engines))]
    for thread in threads:
        thread.start()
    sender.publish(export(nudged(weights, torch.Generator().manual_seed(2), 0.5)))
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(same_bits(each, weights) for each in found)
    sender.close()


# Over sockets


class Proxy:
    """Stands between an engine and a sender, and does something to the bytes of the first answers."""

    def __init__(self, payload: SocketPayload, harm: Callable[[bytes], bytes], times: int = 1) -> None:
        self._there, self._harm, self._times = (payload.address, payload.port), harm, times
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.payload = replace(payload, address="127.0.0.1", port=self._listening.getsockname()[1])
        self.answers = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                engine, _ = self._listening.accept()
            except OSError:
                return
            with engine, socket.create_connection(self._there) as sender:
                sender.sendall(engine.makefile("rb").readline())
                answer = sender.makefile("rb").read()
                self.answers += 1
                engine.sendall(self._harm(answer) if self.answers <= self._times else answer)

    def close(self) -> None:
        self._listening.close()


def flipped(answer: bytes) -> bytes:
    damaged = bytearray(answer)
    damaged[-3] ^= 0x10
    return bytes(damaged)


@pytest.mark.parametrize(
    ("harm", "named"),
    [(flipped, "head"), (lambda answer: answer[: len(answer) // 2], "broke off"), (lambda answer: b"", "not answer")],
    ids=["a flipped bit", "half a message", "no answer"],
)
def test_changes_that_come_damaged_are_followed_by_the_whole_weights(harm: Any, named: str) -> None:
    sender, engine, generator = DeltaSocket(PATIENCE_S), DeltaSocket(PATIENCE_S, Bases()), torch.Generator()
    weights = {name: tensor for name, tensor in model().items() if name != "scale"}
    fetched(engine, sender.publish(export(weights)))
    weights = nudged(weights, generator, 0.05)
    proxy = Proxy(sender.publish(export(weights)), harm)
    assert same_bits(fetched(engine, proxy.payload)[0], weights)
    counts = sender.publish(export(weights)).counts
    assert (counts.fallbacks, proxy.answers) == (1, 2)
    assert named in counts.why
    proxy.close()
    sender.close()


def test_weights_that_come_damaged_twice_are_refused(raises: Raises) -> None:
    sender, engine = DeltaSocket(PATIENCE_S), DeltaSocket(PATIENCE_S, Bases())
    proxy = Proxy(sender.publish(export(model())), flipped, times=2)
    with raises(BackendError, 1, "digests"):
        fetched(engine, proxy.payload)
    assert same_bits(fetched(engine, proxy.payload)[0], model())  # asked for anew, they come
    proxy.close()
    sender.close()


@pytest.mark.parametrize("request_", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"token": 7}\n', b'{"token": "x"}\n', b"[]\n"])
def test_a_stranger_is_told_nothing(request_: bytes) -> None:
    sender = DeltaSocket(PATIENCE_S)
    payload = sender.publish(export(model()))
    assert payload.token not in repr(payload)
    with socket.create_connection((payload.address, payload.port), PATIENCE_S) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert same_bits(fetched(DeltaSocket(PATIENCE_S, Bases()), payload)[0], model())
    sender.close()


def test_an_engine_that_hangs_keeps_neither_the_trainer_nor_other_engines() -> None:
    sender, big = DeltaSocket(1.0), {"big": torch.ones(2**22)}
    payload = sender.publish(export(big))
    request = {"token": payload.token, "version": 1, "base": None, "why": "", "who": "one that hangs"}
    with socket.create_connection((payload.address, payload.port), PATIENCE_S) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")  # and reads nothing
        begin = time.monotonic()
        payload = sender.publish(export({"big": torch.zeros(2**22)}))
        assert same_bits(fetched(DeltaSocket(PATIENCE_S, Bases()), payload)[0], {"big": torch.zeros(2**22)})
        assert time.monotonic() - begin < PATIENCE_S / 2
    sender.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "nemorl-delta-socket"]


def follow(pipe: Any) -> None:
    """An engine in a process of its own: digests of what it fetches, and bytes that it read."""
    from nemorl_rl.transports.delta.socket import DeltaSocket
    from nemorl_tensors.engines.digests import digests

    while (payload := pipe.recv()) is not None:
        found, nbytes = fetched(DeltaSocket(PATIENCE_S), payload)
        pipe.send((digests(found), nbytes))


@pytest.mark.slow
def test_processes_follow_and_one_that_was_killed_and_replaced_gets_a_base() -> None:
    from nemorl_tensors.engines.digests import digests

    context = multiprocessing.get_context("spawn")

    def start() -> tuple[Any, Any]:
        here, there = context.Pipe()
        process = context.Process(target=follow, args=(there,), daemon=True)
        process.start()
        return process, here

    sender, engines, generator = DeltaSocket(PATIENCE_S), [start(), start()], torch.Generator().manual_seed(2)
    weights, size = model(), sum(tensor.nbytes for tensor in model().values())
    read_bytes: list[list[int]] = []
    for number in range(1, 6):
        if number == 4:
            os.kill(engines[1][0].pid, signal.SIGKILL)
            engines[1] = start()
        weights = nudged(weights, generator, 0.02)
        payload = sender.publish(export(weights))
        for _, pipe in engines:
            pipe.send(payload)
        answers = []
        for _, pipe in engines:
            assert pipe.poll(PATIENCE_S)
            answers.append(pipe.recv())
        assert [digest for digest, _ in answers] == [digests(weights)] * 2
        read_bytes.append([nbytes for _, nbytes in answers])
    assert [[nbytes > size for nbytes in pair] for pair in read_bytes] == [
        [True, True],
        [False, False],
        [False, False],
        [False, True],
        [False, False],
    ]
    assert sender.publish(export(weights)).counts.fallbacks == 0
    for process, pipe in engines:
        pipe.send(None)
        process.join(PATIENCE_S)
    sender.close()


# In folders


def test_changes_that_were_damaged_on_disk_are_followed_by_the_whole_weights(weights_folder: Path) -> None:
    sender, engine, generator = DeltaFolder(PATIENCE_S), DeltaFolder(PATIENCE_S, Bases()), torch.Generator()
    weights = model()
    fetched(engine, sender.publish(export(weights)))
    for harm in ("flip", "cut", "remove"):
        weights = nudged(weights, generator, 0.05)
        payload = sender.publish(export(weights))
        file = Path(payload.sender) / f"{payload.number:06}.changes"
        content = file.read_bytes()
        if harm == "flip":
            file.write_bytes(flipped(content))
        elif harm == "cut":
            file.write_bytes(content[: len(content) // 2])
        else:
            file.unlink()
        assert same_bits(fetched(engine, payload)[0], weights), harm
    assert sender.publish(export(weights)).counts.fallbacks == 3
    sender.close()


def test_a_whole_version_that_was_damaged_on_disk_is_written_anew(weights_folder: Path) -> None:
    sender, engine = DeltaFolder(PATIENCE_S), DeltaFolder(PATIENCE_S, Bases())
    payload = sender.publish(export(model()))
    file = Path(payload.sender) / "000001.whole"
    file.write_bytes(flipped(file.read_bytes()))
    assert same_bits(fetched(engine, payload)[0], model())
    sender.close()


def test_a_folder_holds_two_versions_and_is_gone_at_the_end(weights_folder: Path) -> None:
    sender, weights, generator = DeltaFolder(PATIENCE_S), model(), torch.Generator()
    for _ in range(5):
        payload = sender.publish(export(weights := nudged(weights, generator, 0.02)))
    files = sorted(path.name for path in Path(payload.sender).glob("*.*"))
    assert files == ["000004.changes", "000005.changes"]
    sender.close()
    assert list(weights_folder.iterdir()) == []


def test_a_trainer_without_a_folder_says_which_variable_is_missing(
    monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.delenv("NEMORL_WEIGHTS_FOLDER", raising=False)
    with raises(UsageError, "NEMORL_WEIGHTS_FOLDER"):
        DeltaFolder(PATIENCE_S).publish(export(model()))
