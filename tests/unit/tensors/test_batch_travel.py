"""How a batch is cut for ranks and crosses to them: what arrives, and how many bytes it takes."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.resources.policies import TrainingPolicy
from nemorl_tensors import TokenBatch


def batch(lengths: Sequence[int] = (3, 1, 4, 2)) -> TokenBatch:
    token = itertools.count()
    made = TokenBatch.from_sequences([[next(token) for _ in range(n)] for n in lengths], [[True] * n for n in lengths])
    advantages = torch.arange(made.num_tokens, dtype=torch.float32) / 7
    return made.with_tokens(advantages=advantages, half=advantages.bfloat16()).with_sequences(
        reward=torch.arange(len(lengths)).float()
    )


def assert_equal(found: TokenBatch, expected: TokenBatch) -> None:
    for name in ("token_ids", "lengths", "mask", "loss_weights"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(expected, name).dtype, name
    assert (found.loss_aggregation, found.temperature) == (expected.loss_aggregation, expected.temperature)
    assert [*found.token_fields, *found.sequence_fields] == [*expected.token_fields, *expected.sequence_fields]
    for name in [*found.token_fields, *found.sequence_fields]:
        assert torch.equal(found[name], expected[name]), name
        assert found[name].dtype == expected[name].dtype, name


def through_buffers(sent: TokenBatch) -> tuple[TokenBatch, list[Any]]:
    """As Ray sends it: buffers beside the pickle, which arrive read-only."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(body, buffers=[bytes(buffer) for buffer in buffers]), buffers


@pytest.mark.parametrize("picked", [[0, 1, 2, 3], [2, 0], [3], [1, 2, 0], [], [2, 2]])
@pytest.mark.parametrize("lengths", [(3, 1, 4, 2), (3000, 1, 4000, 2000)])
def test_selected_sequences_are_those_asked_for_in_that_order(lengths: tuple[int, ...], picked: list[int]) -> None:
    whole = batch(lengths)
    found = whole.select(picked)
    sequences = whole.token_ids.split(whole.lengths.tolist())
    assert found.token_ids.tolist() == [token for index in picked for token in sequences[index].tolist()]
    assert torch.equal(found["advantages"], found.token_ids / 7)
    assert found["reward"].tolist() == picked


def test_a_selection_may_contain_empty_sequences() -> None:
    whole = batch((2, 0, 3))
    assert whole.select([2, 1]).token_ids.tolist() == [2, 3, 4]
    assert whole.select([1, 0]).lengths.tolist() == [0, 2]


def test_a_selection_owns_its_memory() -> None:
    whole = batch()
    assert whole.select(range(4)).token_ids.data_ptr() != whole.token_ids.data_ptr()


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("lengths", [(3, 1, 4, 2), (1,), ()])
def test_a_pickled_batch_arrives_whole(lengths: tuple[int, ...], protocol: int) -> None:
    sent = replace(batch(lengths), temperature=0.7, loss_aggregation="sequence")
    assert_equal(pickle.loads(pickle.dumps(sent, protocol=protocol)), sent)


def test_a_batch_arrives_whole_from_read_only_memory(recwarn: pytest.WarningsRecorder) -> None:
    sent = batch()
    found, _ = through_buffers(sent)
    assert_equal(found, sent)
    assert not recwarn.list


def test_tensors_leave_the_pickle_as_buffers_of_their_own_size() -> None:
    tokens, sequences = 10, 4
    # ids 8 + mask 1 + weights 4 + advantages 4 + half 2 bytes per token; lengths 8 + reward 4 bytes per sequence
    _, buffers = through_buffers(batch())
    assert sum(buffer.raw().nbytes for buffer in buffers) == 19 * tokens + 12 * sequences


def test_a_view_sends_only_what_it_shows() -> None:
    memory = torch.arange(100_000)
    view = replace(batch(), token_ids=memory[5:15])
    assert len(pickle.dumps(view)) < 5_000
    assert pickle.loads(pickle.dumps(view)).token_ids.tolist() == list(range(5, 15))


class Recorder:
    """A worker group that keeps what it was given."""

    def __init__(self, ranks: int) -> None:
        self.data_parallel_size = ranks
        self.given: list[TokenBatch] = []

    def put(self, values: Sequence[TokenBatch]) -> list[TokenBatch]:
        return list(values)

    def scatter(self, verb: object, shards: Sequence[TokenBatch], *args: Any) -> list[Any]:
        self.given = list(shards)
        return [part.token_ids.float() for part in self.given]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_call_for_logprobs_sees_no_fields_of_the_update(ranks: int) -> None:
    workers = Recorder(ranks)
    TrainingPolicy(workers).get_logprobs(batch())  # type: ignore[arg-type]
    assert [list(part.token_fields) for part in workers.given] == [[]] * ranks
    assert sum(part.num_tokens for part in workers.given) == 10


def test_each_sequence_goes_to_the_emptiest_rank_longest_first() -> None:
    # 9 -> 0, 7 -> 1, 5 -> 2, 4 -> 2 (5 < 7 < 9), 2 -> 1 (7 < 9 = 9), 1 -> 0 (all at 9: the first)
    assert batch((4, 9, 2, 7, 1, 5)).shards(3) == [[1, 4], [2, 3], [0, 5]]
