"""A batch at its ranks: sent once, referred to by every call, and let go with the batch."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.metrics import Sum
from nemorl.resources.policies import TrainingPolicy
from nemorl_tensors import TokenBatch


class Value:
    """What Ray's store holds: it dies with the last reference to it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Store:
    """A worker group whose ranks copy what they read, and which counts what is sent and read."""

    def __init__(self, ranks: int) -> None:
        self.data_parallel_size = ranks
        self.sent: list[list[str]] = []
        """Fields of the shards of each ``put``"""
        self.read_from: list[int] = []
        """Values that each ``read`` asked for"""
        self.seen: list[tuple[str, list[str]]] = []
        """(method, fields of a shard) of each call"""
        self.values: list[weakref.ref[Value]] = []

    @property
    def alive(self) -> int:
        return sum(one() is not None for one in self.values)

    def put(self, values: Sequence[TokenBatch]) -> list[Value]:
        self.sent.append(sorted(values[0].token_fields))
        return [self._kept(pickle.dumps(values[rank])) for rank in range(len(values))]

    def read(self, references: Sequence[Value]) -> list[Any]:
        self.read_from.append(len(references))
        return [pickle.loads(reference.value) for reference in references]

    def scatter_kept(self, verb: Callable[..., Any], shards: Any, *args: Any) -> list[Value]:
        return [self._kept(pickle.dumps(answer)) for answer in self.scatter(verb, shards, *args)]

    def scatter(self, verb: Callable[..., Any], shards: Any, *args: Any) -> list[Any]:
        given = [shards.make(*(pickle.loads(part[rank].value) for part in shards.parts)) for rank in range(len(shards))]
        self.seen.append((verb.__name__, sorted(given[0].token_fields)))
        return [getattr(self, verb.__name__)(shard, *args) for shard in given]

    def _kept(self, value: Any) -> Value:
        kept = Value(value)
        self.values.append(weakref.ref(kept))
        return kept

    # What a rank does

    def get_logprobs(self, batch: TokenBatch, weights: str) -> torch.Tensor:
        return -batch.token_ids.float() * (2 if weights == "reference" else 1)

    def train_step(self, batch: TokenBatch, loss: Any) -> dict[str, Any]:
        return {name: Sum(float((batch[name] * batch.token_ids).sum())) for name in batch.token_fields}


def batch() -> TokenBatch:
    lengths, token = [4, 9, 2, 7, 1, 5], iter(range(100))
    found = TokenBatch.from_sequences([[next(token) for _ in range(n)] for n in lengths], [[True] * n for n in lengths])
    return found.with_tokens(advantages=torch.arange(28) / 4)


def at_ranks(store: Store, whole: TokenBatch) -> TokenBatch:
    policy = TrainingPolicy(store)  # type: ignore[arg-type]
    return policy.with_logprobs(policy.with_logprobs(whole, "old"), "reference", "reference")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_step_sends_its_shards_once_and_its_log_probs_never(ranks: int) -> None:
    store = Store(ranks)
    policy = TrainingPolicy(store)  # type: ignore[arg-type]
    found = at_ranks(store, batch())
    metrics = [policy.train_step(found, None) for _ in range(2)]
    assert (store.sent, store.read_from) == ([["advantages"]], [])
    of_update = ("train_step", ["advantages", "old", "reference"])
    assert store.seen == [("get_logprobs", []), ("get_logprobs", []), of_update, of_update]
    # Token t has id t: sums of t * t / 4, -t * t and -2 * t * t over t < 28, where the squares add up to 6930.
    for each in metrics:
        assert {name: metric.value for name, metric in each.items()} == {
            "advantages": 6930 / 4,
            "old": -6930.0,
            "reference": -2 * 6930.0,
        }


def test_what_the_driver_reads_is_read_once_and_in_order() -> None:
    store = Store(3)
    found = at_ranks(store, batch())
    assert "old" in found
    assert found["old"].tolist() == [-token for token in range(28)]
    assert found.at_hand().token_fields["old"] is found["old"]
    assert store.read_from == [3, 3]  # of the old policy and of the reference


def test_a_selection_reads_from_the_ranks_that_have_it() -> None:
    store = Store(6)  # one sequence each
    found = at_ranks(store, batch()).select([3, 1])
    assert found.token_fields["old"].tolist() == [-token for token in (*range(15, 22), *range(4, 13))]
    assert store.read_from == [2, 2]


def test_minibatches_are_sent_once_for_all_epochs() -> None:
    store = Store(2)
    policy = TrainingPolicy(store)  # type: ignore[arg-type]
    parts = at_ranks(store, batch()).minibatches(2)
    for part in [*parts, *parts]:
        policy.train_step(part, None)
    assert store.sent == [["advantages"], *[["advantages", "old", "reference"]] * 2]
    assert [part["old"].sum().item() for part in parts] == [-sum(range(15)), -sum(range(15, 28))]


def test_a_changed_field_is_sent_and_the_shards_of_before_are_let_go() -> None:
    store = Store(2)
    policy = TrainingPolicy(store)  # type: ignore[arg-type]
    found = at_ranks(store, batch())
    changed = found.with_tokens(advantages=torch.ones(28))
    assert policy.train_step(changed, None)["advantages"].value == sum(range(28))
    assert len(store.sent) == 2
    assert store.alive == 2 * (1 + 2)  # of two ranks the new shard, and log-probs twice
    assert policy.train_step(replace(found, temperature=0.5), None)["advantages"].value == 6930 / 4
    assert len(store.sent) == 3


def test_log_probs_of_a_group_with_other_shards_are_sent_to_this_one() -> None:
    two, three = Store(2), Store(3)
    metrics = TrainingPolicy(three).train_step(at_ranks(two, batch()), None)  # type: ignore[arg-type]
    assert metrics["old"].value == -6930.0
    assert three.sent == [["advantages", "old", "reference"]]


def test_models_of_one_sharding_refer_to_the_same_shards() -> None:
    actor, critic = Store(2), Store(2)
    TrainingPolicy(critic).train_step(at_ranks(actor, batch()), None)  # type: ignore[arg-type]
    assert (len(actor.sent), len(critic.sent)) == (1, 0)


def test_nothing_is_held_when_the_batch_is_gone() -> None:
    gc.disable()  # references alone have to do it
    try:
        store = Store(2)
        found = at_ranks(store, batch())
        TrainingPolicy(store).train_step(found, None)  # type: ignore[arg-type]
        assert store.alive == 2 * 3
        del found
        assert store.alive == 0
    finally:
        gc.enable()


def test_a_batch_that_leaves_takes_its_log_probs_along_and_no_reference() -> None:
    found = pickle.loads(pickle.dumps(at_ranks(Store(2), batch())))
    assert found.token_fields["old"].tolist() == [-token for token in range(28)]
    assert (found.held, found.places) == ({}, [])
