"""The training policy over several ranks, each of which sees only its shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from nemorl.errors import ForeignError
from nemorl.metrics import Mean, Sum
from nemorl.plugins import registry
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.policies import TrainingPolicy
from nemorl.resources.worker import WorkerContext
from nemorl.weights import Distance, WeightHandle, in_process_handle
from nemorl_rl.placement.place import choose_transport
from nemorl_tensors import TokenBatch
from recorded_messages import Raises


class Rank:
    """Says of each token what it is, so that a mix-up shows."""

    def get_logprobs(self, batch: TokenBatch, weights: str) -> torch.Tensor:
        return -batch.token_ids.float() * (2 if weights == "reference" else 1)

    def train_step(self, batch: TokenBatch, loss: object) -> dict[str, Any]:
        return {"loss": Sum(float(batch.loss_weights.sum())), "tokens": Mean(batch.num_tokens, len(batch))}


class Ranks:
    def __init__(self, count: int) -> None:
        self.data_parallel_size = count
        self.given: list[Any] = []

    def put(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    read = put

    def scatter(self, verb: Callable[..., Any], shards: Sequence[TokenBatch], *args: Any) -> list[Any]:
        self.given = list(shards)
        return [getattr(Rank(), verb.__name__)(shard, *args) for shard in shards]

    scatter_kept = scatter


def batch() -> TokenBatch:
    lengths, token = [4, 9, 2, 7, 1, 5], iter(range(100))
    return TokenBatch.from_sequences([[next(token) for _ in range(n)] for n in lengths], [[True] * n for n in lengths])


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
@pytest.mark.parametrize(("weights", "factor"), [("policy", 1), ("reference", 2)])
def test_logprobs_come_back_in_the_order_of_the_batch(ranks: int, weights: Any, factor: int) -> None:
    found = TrainingPolicy(Ranks(ranks)).get_logprobs(batch(), weights)  # type: ignore[arg-type]
    assert found.tolist() == [-factor * token for token in range(28)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_metrics_of_ranks_are_merged_by_their_own_reductions(ranks: int) -> None:
    workers = Ranks(ranks)
    metrics = TrainingPolicy(workers).train_step(batch(), object())  # type: ignore[arg-type]
    assert metrics["loss"].value == pytest.approx(1.0)  # the weights of the shards add up to the step's
    assert metrics["tokens"].value == pytest.approx(28 / 6)
    assert sum(part.num_tokens for part in workers.given) == 28


def test_a_backend_that_raises_is_named(raises: Raises) -> None:
    class Broken:
        def generate(self, requests: object) -> None:
            raise MemoryError("full")

    with raises(ForeignError, "Broken", "MemoryError"):
        LocalWorkerGroup(lambda _: Broken(), WorkerContext(), "generation backend Broken").call(Broken.generate, [])


@pytest.mark.parametrize(
    ("offered", "accepted", "chosen"),
    [
        (("shared_memory", "in_process"), ("in_process", "shared_memory"), "shared_memory"),
        (("in_process", "shared_memory"), ("shared_memory",), "shared_memory"),
        (("in_process",), ("shared_memory",), None),
        (("pigeon",), ("pigeon",), None),
        ((), ("in_process",), None),
    ],
)
def test_the_senders_first_choice_that_the_receiver_accepts_is_taken(
    offered: tuple[str, ...], accepted: tuple[str, ...], chosen: str | None
) -> None:
    found = choose_transport(offered, accepted, plugins=registry())
    assert (found or "").rpartition(":")[2] == (chosen or "")


@pytest.mark.parametrize(
    ("distance", "chosen"), [("process", "in_process"), ("node", "shared_memory"), ("cluster", "object_store")]
)
def test_a_transport_must_cover_the_distance(distance: Distance, chosen: str) -> None:
    every = ("in_process", "shared_memory", "object_store")
    found = choose_transport(every, every, distance, plugins=registry())
    assert (found or "").rpartition(":")[2] == chosen


def test_an_in_process_handle_hands_over_the_live_parameters() -> None:
    weight = torch.zeros(2)
    handle = in_process_handle(lambda: iter([{"w": weight}]), 3)
    assert isinstance(handle, WeightHandle)
    assert (handle.transport, handle.version) == ("nemorl-core:in_process", 3)
    assert next(handle.buckets())["w"] is weight
