"""Weights that lie in pieces: a view of one is read from the pieces it touches, and nothing else is."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nemorl.errors import BackendError
from nemorl.weights import IN_PROCESS
from nemorl_tensors.engines.boxes import Box, view_box
from nemorl_tensors.engines.pieces import LazyWeight, Piece, PieceSender, Place, SpreadHandle, lazy_weight
from recorded_messages import Raises
from torch import Tensor

SHARED_MEMORY = "nemorl-rl:shared_memory"
WHOLE = torch.arange(24.0).reshape(4, 6)
PIECES = [
    Piece("w", (4, 6), (0, 0), WHOLE[:2, :3]),
    Piece("w", (4, 6), (0, 3), WHOLE[:2, 3:]),
    Piece("w", (4, 6), (2, 0), WHOLE[2:]),
]
LAZY_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "rows": lambda t: t.narrow(0, 1, 2),
    "columns of rows": lambda t: t[1:3, 2:5],
    "one row": lambda t: t[2],
    "one column": lambda t: t[:, 4],
    "one element": lambda t: t[3, 5],
    "transposed": lambda t: t.t()[1:4],
    "chunk": lambda t: t.chunk(3, 1)[1],
    "split twice": lambda t: t.split([1, 3])[1].split(2, 1)[0],
    "another axis": lambda t: t.unsqueeze(1)[1:],
    "merged axes": lambda t: t.view(-1)[4:15],
    "every other row": lambda t: t[::2],
    "cut axes": lambda t: t.view(4, 2, 3)[:, 1],
    "expanded": lambda t: t[:1].expand(3, 6),
    "data": lambda t: t.data.detach(),
    "nothing": lambda t: t[2:2],
}


@pytest.mark.parametrize("name", sorted(LAZY_VIEWS))
def test_a_view_is_lazy_and_reads_what_the_whole_has_there(name: str) -> None:
    view = LAZY_VIEWS[name](lazy_weight(PIECES))
    assert isinstance(view, LazyWeight)
    wanted = LAZY_VIEWS[name](WHOLE)
    assert view.shape == wanted.shape
    assert torch.equal(view.clone(), wanted)
    target = torch.full(wanted.shape, -1.0, dtype=torch.bfloat16)
    target.copy_(view)
    assert torch.equal(target, wanted.bfloat16())


def test_rows_of_several_ranks_are_read_in_their_order() -> None:
    rows = [Piece("w", (4, 6), (first, 0), WHOLE[first : first + 1]) for first in (2, 0, 3, 1)]
    lazy = lazy_weight(rows)
    target = torch.nn.Parameter(torch.full((4, 6), -1.0))
    with torch.no_grad():
        target.copy_(lazy)
        assert torch.equal(target, WHOLE)
        target.data.narrow(0, 0, 2).copy_(lazy.narrow(0, 1, 2))
    assert torch.equal(target[:2], WHOLE[1:3])
    assert lazy.narrow(0, 1, 2) is lazy.narrow(0, 1, 2)  # made once for all versions that lie in these places
    assert lazy.chunk(2, 1)[1] is lazy.chunk(2, 1)[1]
    assert torch.equal(lazy.chunk(2, 1)[1].clone(), WHOLE[:, 3:])


def test_other_operations_read_first() -> None:
    lazy = lazy_weight(PIECES)
    assert torch.equal(lazy + 1, WHOLE + 1)
    assert torch.equal(torch.cat([lazy[:1], lazy[3:]]), torch.cat([WHOLE[:1], WHOLE[3:]]))
    assert torch.equal(lazy.to(torch.float64), WHOLE.double())
    assert float(lazy[1, 1]) == 7.0


def test_only_the_pieces_of_a_view_are_read() -> None:
    gone = [PIECES[0], PIECES[1], replace(PIECES[2], values=torch.full((2, 6), torch.nan))]
    target = torch.empty(2, 6)
    target.copy_(lazy_weight(gone)[:2])
    assert torch.equal(target, WHOLE[:2])


@pytest.mark.parametrize("wrong", [PIECES[:2], [*PIECES, PIECES[0]]])
def test_pieces_that_do_not_cover_a_tensor_once_are_refused(wrong: list[Piece], raises: Raises) -> None:
    with raises(BackendError):
        lazy_weight(wrong)


def test_a_handle_joins_what_ranks_sent() -> None:
    bias = torch.arange(3.0)
    ranks = [
        PieceSender().publish(IN_PROCESS, lambda: PIECES[:1]),
        PieceSender().publish(IN_PROCESS, lambda: [*PIECES[1:], Piece.whole("bias", bias)]),
    ]
    (bucket,) = SpreadHandle(IN_PROCESS, 3, ranks).buckets()
    assert {name: tensor.clone().tolist() for name, tensor in bucket.items()} == {
        "w": WHOLE.tolist(),
        "bias": bias.tolist(),
    }
    assert not SpreadHandle(SHARED_MEMORY, 3, []).is_in_process


def test_what_ranks_send_crosses_process_boundaries_as_text() -> None:
    text = Place.text("w", (4, 6), (2, 0))
    assert text == '["w", [4, 6], [2, 0]]'
    assert Place.parse(text) == Place("w", (4, 6), (2, 0))


@pytest.fixture
def ranks() -> Iterator[list[PieceSender]]:
    made = [PieceSender(), PieceSender()]
    yield made
    for sender in made:
        sender.close()


def joined(ranks: list[PieceSender], version: int, scale: float) -> Mapping[str, Tensor]:
    """The weights as a reader in another process has them: their handle has been pickled."""
    parts = [[replace(piece, values=scale * piece.values) for piece in some] for some in (PIECES[:1], PIECES[1:])]
    sent = [rank.publish(SHARED_MEMORY, lambda part=part: part) for rank, part in zip(ranks, parts, strict=True)]
    handle = pickle.loads(pickle.dumps(SpreadHandle(SHARED_MEMORY, version, sent)))
    (bucket,) = handle.buckets()
    return bucket


def test_versions_that_lie_in_the_same_places_are_joined_once(ranks: list[PieceSender]) -> None:
    found = [joined(ranks, version, scale=version) for version in (1, 2, 3, 4)]
    assert found[2] is found[0]
    assert found[3] is found[1]
    target = torch.empty(2, 6)
    for version in (3, 4):  # the memory of 1 and 2 now holds them
        target.copy_(found[version - 1]["w"].chunk(2)[1])
        assert torch.equal(target, version * WHOLE[2:])


def test_pieces_of_a_rank_that_was_replaced_are_joined_anew(ranks: list[PieceSender]) -> None:
    for version in (1, 2):
        joined(ranks, version, scale=version)
    ranks[1].close()
    assert torch.equal(joined(ranks, 3, scale=3.0)["w"].clone(), 3 * WHOLE)


def test_memory_of_ranks_that_ended_is_released_by_the_next_fetch(ranks: list[PieceSender]) -> None:
    torch.empty(2, 6).copy_(joined(ranks, 1, scale=1.0)["w"].chunk(2)[0])
    for rank in ranks:
        rank.close()
    other = [PieceSender(), PieceSender()]
    joined(other, 1, scale=1.0)
    count = sum("nemorl-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert count == 4  # of two senders: each maps its file, and so does their reader
    for rank in other:
        rank.close()


def test_a_view_box_is_found_for_boxes_alone() -> None:
    whole = torch.empty(4, 6, 2, device="meta")
    found = view_box(whole[1:3, 2:, 1].t(), whole.shape)
    assert found is not None
    assert found.box == Box((1, 2, 1), (2, 4, 1))
    assert found.dimensions == (1, 0)
    assert view_box(whole.view(24, 2), whole.shape) is None
    assert view_box(whole[::2], whole.shape) is None
