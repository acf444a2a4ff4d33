"""Arrays that are used like the tuples they stand for."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy
import pytest
import torch
from nemorl.media import FIRST_ID
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_tensors import TokenBatch
from nemorl_tensors.numbers import Numbers, joined, laid_out, logprobs, token_ids

VALUES = (5, 700_000, 7)


def test_they_are_read_like_the_tuple() -> None:
    ids = token_ids(VALUES)
    assert (len(ids), ids[1], ids[-1], [*ids], ids.index(7), ids.count(5)) == (3, 700_000, 7, [*VALUES], 2, 1)
    assert (5 in ids, 6 in ids, bool(ids), bool(token_ids(()))) == (True, False, True, False)
    assert [type(value) for value in ids] == [int, int, int]
    assert (type(ids[0]), type(logprobs([-0.5])[0]), type(Numbers(numpy.array([True]))[0])) == (int, float, bool)
    assert ids[1:] == VALUES[1:]
    assert ids[::-1] == VALUES[::-1]
    with pytest.raises(IndexError):
        ids[3]


def test_they_are_equal_to_the_tuple_and_hash_alike() -> None:
    ids = token_ids(VALUES)
    assert ids == VALUES
    assert ids == VALUES  # a tuple is asked first, and does not know
    assert ids == token_ids(VALUES)
    assert ids != VALUES[:2]
    assert ids != [*VALUES]  # neither is the tuple
    assert {VALUES: "found"}[ids] == "found"  # type: ignore[index]
    assert repr(ids) == repr(VALUES)


def test_they_are_added_to_tuples_and_lists() -> None:
    ids, grown = token_ids(VALUES), [1]
    grown += ids
    assert grown == [1, *VALUES]
    assert (1, *ids) == (1,) + ids == (1, *VALUES)  # noqa: RUF005
    assert ids + (1,) == ids + token_ids((1,)) == (*VALUES, 1)  # noqa: RUF005
    assert ids * 2 == VALUES * 2


def test_json_takes_their_list() -> None:
    assert json.dumps([*token_ids(VALUES)]) == json.dumps(VALUES)


def test_no_value_changes_and_the_smallest_type_that_keeps_it_is_taken() -> None:
    assert token_ids((5, 2**31 - 1)).array.dtype == numpy.int32
    assert token_ids((5, FIRST_ID + 3)) == (5, FIRST_ID + 3)
    # -0.5 is a float32; -0.1 is not: as one it would be -0.10000000149…
    assert logprobs((-0.5, 0.0)).array.dtype == numpy.float32
    assert logprobs((-0.5, -0.1)) == (-0.5, -0.1)
    assert logprobs((-1e300,)) == (-1e300,)
    assert logprobs((float("-inf"),)).array.dtype == numpy.float32


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_they_travel(protocol: int) -> None:
    ids = token_ids(VALUES)[1:]
    assert pickle.loads(pickle.dumps(ids, protocol)) == VALUES[1:]
    assert copy.deepcopy(ids) == ids
    buffers: list[Any] = []
    body = pickle.dumps(ids, 5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [8]  # two ids of 4 bytes, none of the one before them
    assert pickle.loads(body, buffers=buffers) == VALUES[1:]


def test_rows_of_both_kinds_are_laid_end_to_end() -> None:
    rows = [token_ids((1, 2)), (FIRST_ID,), token_ids(())]
    assert laid_out(rows, numpy.int64).tolist() == [1, 2, FIRST_ID]
    assert laid_out([(1, 2), (3,)], numpy.int64).tolist() == [1, 2, 3]
    assert joined([token_ids((1,)), token_ids((FIRST_ID,))]) == (1, FIRST_ID)


def test_a_batch_of_arrays_is_the_batch_of_tuples() -> None:
    told, mask, said = (5, 7, 2), (False, True, True), (0.0, -0.1, -0.5)
    plain = Sample(Prompt(0, "1+1=", (5,)), told, mask, said, Score(1.0), "2", "stop")
    arrays = token_ids(told).declared, Numbers[bool](numpy.array(mask)).declared, logprobs(said).declared
    packed = Sample(plain.prompt, *arrays, plain.score, "2", "stop")
    assert packed == plain
    assert packed.response_tokens == 2
    whole, other = (TokenBatch.from_samples(Samples([one, one]), [0.5, -0.5]) for one in (plain, packed))
    for name in ("token_ids", "mask", "loss_weights"):
        assert torch.equal(getattr(whole, name), getattr(other, name))
    for name in ("generation_logprobs", "advantages"):
        assert torch.equal(whole[name], other[name])
    dropped = TokenBatch.from_samples(Samples([packed, packed]), drop=[True, False])
    assert dropped.mask.tolist() == [False] * 4 + [True] * 2
