"""The shared memory transport: what stays mapped, and for how long. Round trips are a conformance check's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nemorl.errors import WeightsLostError
from nemorl_rl.transports.shared_memory import HALF_BYTES, SharedMemory, SharedPayload
from recorded_messages import Raises
from torch import Tensor


@pytest.fixture
def sender() -> Iterator[SharedMemory]:
    made = SharedMemory()
    yield made
    made.close()


def publish(sender: SharedMemory, *tensors: Tensor) -> SharedPayload:
    return sender.publish(lambda: iter([{str(index): tensor} for index, tensor in enumerate(tensors)]))


def fetch(payload: SharedPayload) -> list[Tensor]:
    return [tensor for bucket in SharedMemory().fetch(payload) for tensor in bucket.values()]


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "nemorl-weights" in line]


def test_the_next_version_is_read_through_the_mapping_of_the_one_in_use(sender: SharedMemory) -> None:
    [first] = fetch(publish(sender, torch.ones(3)))
    [second] = fetch(publish(sender, torch.full((3,), 2.0)))
    assert second.data_ptr() - first.data_ptr() == HALF_BYTES
    assert (first.tolist(), second.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_a_receiver_that_copies_maps_once(sender: SharedMemory) -> None:
    fetch(publish(sender, torch.zeros(3)))
    before = mappings()
    for value in (1.0, 2.0, 3.0):
        assert fetch(publish(sender, torch.full((3,), value)))[0].tolist() == [value] * 3  # no tensor is kept
    assert mappings() == before


def test_versions_that_lie_as_the_one_before_are_the_same_tensors(sender: SharedMemory) -> None:
    found = [fetch(publish(sender, torch.full((3,), value), torch.zeros(2)))[0] for value in (1.0, 2.0, 3.0, 4.0)]
    assert found[2] is found[0]
    assert found[3] is found[1]
    assert found[0].tolist() == [3.0] * 3
    for other in (torch.ones(4), torch.ones(4, dtype=torch.int32)):  # lies elsewhere, then has other elements
        publish(sender, torch.zeros(1))
        got = fetch(publish(sender, other, torch.full((2,), 5.0)))
        assert got[0].dtype == other.dtype
        assert [tensor.tolist() for tensor in got] == [[1.0] * 4, [5.0] * 2]


def test_tensors_in_another_order_are_not_confused(sender: SharedMemory) -> None:
    one, two = torch.full((3,), 1.0), torch.full((3,), 2.0)
    for bucket in ({"a": one, "b": two}, {"a": one, "b": two}, {"b": two, "a": one}, {"b": two}):
        payload = sender.publish(lambda bucket=bucket: iter([bucket]))
        [found] = SharedMemory().fetch(payload)
        assert {name: t.tolist() for name, t in found.items()} == {name: t.tolist() for name, t in bucket.items()}


def test_a_mapping_leaves_when_neither_its_sender_nor_a_tensor_is_left(sender: SharedMemory) -> None:
    fetch(publish(sender, torch.ones(1)))
    before = len(mappings())
    other = SharedMemory()
    first, second = fetch(publish(other, torch.ones(3), torch.ones(2)))
    other.close()
    assert len(mappings()) == before + 1
    fetch(publish(sender, torch.ones(1)))
    assert len(mappings()) == before + 1
    del first
    assert len(mappings()) == before + 1
    del second
    assert len(mappings()) == before


def test_two_senders_are_not_confused(sender: SharedMemory) -> None:
    other = SharedMemory()
    [first], [second] = fetch(publish(sender, torch.ones(1))), fetch(publish(other, torch.zeros(1)))
    other.close()
    assert (first.item(), second.item()) == (1.0, 0.0)


def test_a_version_may_be_larger_or_smaller_than_those_before(sender: SharedMemory) -> None:
    for size in (10, 100_000, 1, 200_000, 0):
        [found] = fetch(publish(sender, torch.full((size,), float(size))))
        assert torch.equal(found, torch.full((size,), float(size)))


def test_weights_in_use_outlive_their_sender() -> None:
    sender = SharedMemory()
    [found] = fetch(publish(sender, torch.ones(3)))
    sender.close()
    assert found.tolist() == [1.0] * 3


def test_a_closed_sender_is_named_as_the_cause(raises: Raises) -> None:
    sender = SharedMemory()
    payload = publish(sender, torch.ones(3))
    sender.close()
    with raises(WeightsLostError):
        fetch(payload)


def test_a_closed_sender_may_publish_again() -> None:
    sender = SharedMemory()
    for number in (1.0, 2.0):
        assert fetch(publish(sender, torch.full((2,), number)))[0].tolist() == [number] * 2
        sender.close()


def test_no_weights_at_all_can_be_published(sender: SharedMemory) -> None:
    assert fetch(publish(sender)) == []
