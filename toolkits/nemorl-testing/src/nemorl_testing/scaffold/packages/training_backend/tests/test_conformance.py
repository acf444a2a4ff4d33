"""The contract of training backends, and what this one promises besides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.metrics import Metrics
from nemorl.resources.worker import WorkerContext
from nemorl_tensors import TokenBatch
from nemorl_testing import conformance
from torch import Tensor

from nemorl_example.config import ExampleConfig


@dataclass(frozen=True)
class ZeroLoss:
    """A gradient of zero."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return policy_logprobs.sum() * 0.0, {}


test_conformance = conformance("training_backends", "example")


def test_what_it_cannot_do_is_refused(nemorl_tiny_model: Path) -> None:
    policy = PolicyConfig(model_name=str(nemorl_tiny_model), precision="bfloat16")
    with pytest.raises(BackendError, match="training in 2 processes, precision bfloat16"):
        ExampleConfig().build(policy, WorkerContext(world_size=2), reference=False)


def test_a_decay_is_followed(nemorl_tiny_model: Path) -> None:
    schedule = {"kind": "linear", "decay_steps": 4}
    policy = PolicyConfig.model_validate(
        {"model_name": str(nemorl_tiny_model), "schedule": schedule, "optimizer": {"lr": 1e-3}}
    )
    backend = ExampleConfig().build(policy, WorkerContext(), reference=False)
    batch = TokenBatch.from_sequences([[9, 18, 10]], [[False, True, True]])
    rates = [backend.train_step(batch, ZeroLoss())["lr"].value for _ in range(3)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3])
