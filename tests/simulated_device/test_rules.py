"""The simulated device refuses, counts and accounts as CUDA does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nemorl_testing.simulated_device import memory, streams, waits
from nemorl_testing.simulated_device.streams import StreamError
from nemorl_testing.simulated_device.tensors import allocator, races

MIB = 2**20


def test_operands_of_two_devices_are_refused_single_numbers_and_indices_excepted(device: str) -> None:
    here = torch.arange(6.0, device=device)
    with pytest.raises(RuntimeError, match="same"):
        here + torch.ones(6)
    with pytest.raises(RuntimeError, match="same"):
        torch.nn.functional.embedding(torch.tensor([[0, 1]]), here.view(3, 2))
    assert (here * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert here[torch.tensor([5, 0])].tolist() == here[[5, 0]].tolist() == [5.0, 0.0]
    with pytest.raises(TypeError, match="CPU"):
        here.numpy()


def counted(work: Callable[[], Any]) -> int:
    with waits.counted() as lines:
        work()
    return sum(lines.values())


def test_waits_of_the_host_are_counted_with_their_lines(device: str) -> None:
    here, mask = torch.arange(4.0, device=device), torch.tensor([True, False, True, False], device=device)
    counts = torch.tensor([2, 1], device=device)
    # Each once on CUDA too, as its set_sync_debug_mode says.
    for work in (
        here.sum().item,
        here.cpu,
        here.tolist,
        mask.nonzero,
        lambda: here[mask],
        lambda: here[[0, 1]],
        lambda: torch.tensor([1, 2], device=device),
        lambda: torch.repeat_interleave(counts),
        lambda: bool((here > 2).any()),
        torch.accelerator.synchronize,
    ):
        assert counted(work) == 1
    for work in (
        lambda: here + 1,
        lambda: here[counts],
        lambda: torch.where(mask, here, 0.0),
        lambda: torch.zeros(3, device=device),
        lambda: torch.ones(4).to(device, non_blocking=True),
        lambda: torch.repeat_interleave(counts, output_size=3),
        lambda: here.to("cpu", non_blocking=True),
    ):
        assert counted(work) == 0
    with waits.counted() as lines:
        here.sum().item()
    assert [line.partition(":")[0] for line in lines] == ["simulated_device/test_rules.py"]


def test_waits_are_counted_within_each_other(device: str) -> None:
    here = torch.ones(2, device=device)
    with waits.counted() as outer:
        with waits.counted() as inner:
            pass  # nothing yet: both are alike
        here.sum().item()
    assert (sum(outer.values()), sum(inner.values())) == (1, 0)


def test_inference_mode_hides_no_wait(device: str) -> None:
    with torch.inference_mode():
        here = torch.zeros(3, device=device)
        assert counted(here.cpu) == 1


def test_memory_is_rounded_counted_once_for_views_and_given_back(device: str) -> None:
    gc.collect()
    before = allocator.allocated
    whole = torch.empty(100, device=device)  # 400 bytes
    views = [whole[:10], whole.view(10, 10).t(), whole.detach()]
    assert allocator.allocated - before == 512
    del whole
    assert allocator.allocated - before == 512
    del views
    assert allocator.allocated == before
    grown = torch.ones(MIB, device=device)  # 4 MiB
    allocator.reset_peak()
    _ = grown + 1  # another 4 MiB, gone at once
    assert allocator.peak - allocator.allocated in (0, 4 * MIB)
    del grown, _
    assert allocator.allocated == before


def test_the_cache_splits_joins_and_keeps_segments() -> None:
    own = memory.Allocator(total=64 * MIB)
    small, large = own.allocate(1), own.allocate(2 * MIB)
    assert (own.allocated, own.reserved) == (512 + 2 * MIB, 2 * MIB + 20 * MIB)
    second = own.allocate(2 * MIB)  # of the same segment
    assert own.reserved == 22 * MIB
    huge = own.allocate(17 * MIB)  # from 10 MiB on whole multiples of 2 MiB: 18
    assert own.reserved == 40 * MIB
    own.free(huge)
    assert own.reserved == 40 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        own.allocate(60 * MIB)
    assert own.reserved == 22 * MIB, "what is free as a whole went back before it failed"
    for piece in (large, second, small):
        own.free(piece)
    assert own.allocate(20 * MIB) is not None
    assert own.reserved == 22 * MIB, "neighbours that are free again are one piece"


def test_memory_that_cannot_be_resized_is_given_back_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, tensor = allocator.allocated, torch.ones(1024, device=device)
    block = tensor.block  # type: ignore[attr-defined]
    monkeypatch.setattr(allocator, "total", allocator.reserved)
    with pytest.raises(torch.OutOfMemoryError):
        block.resize(64 * MIB)
    del tensor, block
    assert allocator.allocated == before


def test_a_stream_may_be_entered_twice(device: str) -> None:
    before, stream = streams.current(), streams.Stream()
    with stream:
        with stream:
            assert streams.current() is stream
        assert streams.current() is stream
    assert streams.current() is before


def test_a_stream_that_reads_what_another_writes_has_to_wait(device: str) -> None:
    streams: Any = torch.get_device_module(device)
    other, written = streams.Stream(), torch.ones(3, device=device)
    with streams.stream(other), pytest.raises(StreamError, match="waited"):
        written + 1
    other.wait_stream(streams.current_stream())
    with streams.stream(other):
        read = written + 1
    with pytest.raises(StreamError, match="waited"):
        written.zero_()  # the other may still read
    streams.current_stream().wait_event(other.record_event())
    written.zero_()
    assert read.tolist() == [2.0, 2.0, 2.0]


def test_a_copy_to_the_host_holds_nonsense_until_somebody_waits(device: str) -> None:
    here = torch.arange(3.0, device=device)
    late = here.to("cpu", non_blocking=True)
    here += 5  # in the stream's order: the copy has what was there
    assert late.isnan().all()
    event = torch.get_device_module(device).current_stream().record_event()
    event.synchronize()
    assert late.tolist() == [0.0, 1.0, 2.0]


def test_memory_freed_under_another_stream_is_told(device: str) -> None:
    streams: Any = torch.get_device_module(device)
    other, lent, kept = streams.Stream(), torch.ones(3, device=device), torch.ones(3, device=device)
    other.wait_stream(streams.current_stream())
    with streams.stream(other):
        read = [lent + 1, kept + 1]
    kept.record_stream(other)
    del kept
    assert not races
    del lent
    assert len(races) == 1
    races.clear()
    assert len(read) == 2


def test_tied_parameters_stay_one(device: str) -> None:
    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second).to(device)
    assert first.weight is second.weight
    assert len([*model.parameters()]) == 1
    model(torch.ones(1, 2, device=device)).sum().backward()
    assert first.weight.grad is not None
    assert first.weight.grad.device == torch.device(device)
