"""Digests add up over any cut of a tensor, and see what is in the wrong place."""

from __future__ import annotations

import pickle

import pytest
import torch
from nemorl.weights import IN_PROCESS, Digest, WeightHandle
from nemorl_tensors.engines.digests import Box, box_sum, digest, digested, factors, joined, part_digests
from nemorl_tensors.engines.pieces import Piece, PieceSender, spread_handle
from torch import Tensor

SHAPE = (6, 4, 8)


def random(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_digest_is_the_sum_of_words_times_the_numbers_of_their_places() -> None:
    words = torch.tensor([[3, 5], [7, -1]])  # int64: a word each
    rows, columns = (factors(dimension, 2, words.device).tolist() for dimension in (0, 1))
    by_hand = rows[0] * (3 * columns[0] + 5 * columns[1]) + rows[1] * (7 * columns[0] - columns[1])
    assert digest(words) == Digest("int64", (2, 2), by_hand % 2**64)
    assert all(number % 2 for number in rows + columns)
    assert len({*factors(0, 1000, words.device).tolist(), *factors(1, 1000, words.device).tolist()}) == 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("cut", [(0, 2), (1, 3), (2, 4)])
def test_parts_add_up_wherever_they_are_cut(dtype: torch.dtype, cut: tuple[int, int]) -> None:
    tensor, (dimension, place) = random(dtype), cut
    if dtype == torch.uint8 and dimension == 2:
        with pytest.raises(ValueError, match="6"):  # eight bytes are one word
            box_sum(tensor[..., :4], SHAPE, (0, 0, 0))
        return
    boxes: list[Box] = []
    for start, length in ((0, place), (place, SHAPE[dimension] - place)):
        offsets = tuple(start if d == dimension else 0 for d in range(3))
        boxes.append(("w", SHAPE, offsets, tensor.narrow(dimension, start, length)))
    parts = part_digests(boxes)
    assert joined(parts) == {"w": digest(tensor)}
    assert joined([*parts, parts[0]]) == {"w": digest(tensor)}, "two that hold the same box"
    assert joined(parts[:1]) != {"w": digest(tensor)}, "a box is missing"


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (8, 8)])
def test_every_bit_counts(shape: tuple[int, ...]) -> None:
    tensor = random(torch.bfloat16, shape)
    seen = {digest(tensor).value}
    for bit in range(16):
        flipped = tensor.clone().view(torch.int16)
        flipped.view(-1)[-1] ^= 1 << bit if bit < 15 else -(1 << 15)
        seen.add(digest(flipped.view(torch.bfloat16)).value)
    assert len(seen) == 17


def test_rows_and_columns_in_each_others_place_are_seen() -> None:
    tensor = random(torch.float32, (6, 8))
    others = [tensor[[1, 0, 2, 3, 4, 5]], tensor[:, [2, 3, 0, 1, 4, 5, 6, 7]], tensor.t().contiguous().view(6, 8)]
    assert len({digest(each).value for each in (tensor, *others)}) == 4


def test_views_have_the_digest_of_their_values() -> None:
    tensor = random(torch.float32, (7, 9))
    for view in (tensor.t(), tensor[1:, 1:], tensor[1, 3:5]):
        assert digest(view) == digest(view.clone())


def test_an_export_is_digested_as_it_goes() -> None:
    tensors = {"a": random(torch.float32, seed=1), "b": random(torch.bfloat16, seed=2)}
    export, found = digested(lambda: iter([{"a": tensors["a"]}, {"b": tensors["b"]}]))
    assert not found
    assert [name for bucket in export() for name in bucket] == ["a", "b"]
    assert found == {name: digest(tensor) for name, tensor in tensors.items()}
    assert found.seconds > 0


def test_ranks_digest_their_own_pieces() -> None:
    tensor = random(torch.float32, (6, 8))
    ranks = [
        PieceSender().publish(IN_PROCESS, lambda: [Piece("w", (6, 8), (0, 0), tensor[:, :4])], digests=True),
        PieceSender().publish(IN_PROCESS, lambda: [Piece("w", (6, 8), (0, 4), tensor[:, 4:])], digests=True),
    ]
    assert spread_handle(IN_PROCESS, 1, ranks).digests == {"w": digest(tensor)}
    plain = [PieceSender().publish(IN_PROCESS, lambda: [Piece.whole("w", tensor)])]
    assert spread_handle(IN_PROCESS, 1, plain).digests is None


def test_what_crosses_processes_keeps_what_it_cost() -> None:
    export, found = pickle.loads(pickle.dumps(digested))(lambda: iter([{"a": random(torch.float32)}]))
    list(export())
    handle = pickle.loads(pickle.dumps(WeightHandle("shared_memory", 1, None, digests=found)))
    assert (handle.digests, handle.digests.seconds) == (found, found.seconds)
