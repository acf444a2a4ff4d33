"""Tiny Hugging Face models, built once per session, and ragged batches for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.metrics import Metrics, Sum
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.model import load_model
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.model_folder import save_tokenizer
from torch import Tensor


@dataclass(frozen=True)
class WeightedNll:
    """Advantage-weighted negative log-likelihood."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        per_token = torch.where(batch.mask, -policy_logprobs * batch["advantages"], 0.0)
        return (per_token * batch.loss_weights).sum(), {"sequences": Sum(float(len(batch)))}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 folder without weights."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, intermediate_size=64)


@pytest.fixture(scope="session")
def pretrained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with weights, spread out so that log-probs are far from uniform."""
    model = load_model(PolicyConfig(model_name=str(tiny), init="random"), seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    folder = tmp_path_factory.mktemp("pretrained")
    model.save_pretrained(folder)
    save_tokenizer(folder, str(tiny))
    return folder


@pytest.fixture
def weighted_nll() -> WeightedNll:
    return WeightedNll()


Build = Callable[..., DTensorBackend]


@pytest.fixture
def build(pretrained: Path) -> Build:
    """A backend: policy fields as keywords, backend options under ``options``, build flags as they are."""

    def make(
        *,
        reference: bool = False,
        options: dict[str, Any] | None = None,
        seed: int = 42,
        **policy: Any,
    ) -> DTensorBackend:
        config = DTensorConfig(**(options or {}))
        fields = {"model_name": str(pretrained), "optimizer": {"lr": 1e-2}, "max_grad_norm": 1e6, **policy}
        backend = config.build(PolicyConfig(**fields), WorkerContext(seed=seed), reference=reference)
        assert isinstance(backend, DTensorBackend)
        return backend

    return make


@pytest.fixture(scope="session")
def batch() -> TokenBatch:
    """Nine ragged sequences; 5 and 6 are trained on partly, 7 not at all, 8 is one token long."""
    return make_batch()


def make_batch(vocabulary: int = 80) -> TokenBatch:
    draw = random.Random(0)
    lengths = [5, 17, 9, 33, 3, 12, 20, 8, 1]
    ids = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
    masks = [[True] * length for length in lengths]
    masks[5] = [False] * 6 + [True] * 3 + [False] * 3
    masks[6] = [index % 3 == 0 for index in range(20)]
    masks[7] = [False] * 8
    batch = TokenBatch.from_sequences(ids, masks)
    advantages = torch.tensor([draw.uniform(-1, 1) for _ in range(batch.num_tokens)])
    return batch.with_tokens(advantages=advantages)


def plain_logprobs(model: Any, batch: TokenBatch) -> Tensor:
    """What transformers itself computes, one sequence at a time."""
    results, start = [], 0
    for length in batch.lengths.tolist():
        ids = batch.token_ids[start : start + length]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].float() / batch.temperature
        scored = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None]).squeeze(1)
        results.append(torch.cat([torch.zeros(1), scored]))
        start += length
    return torch.where(batch.mask, torch.cat(results), 0.0)
