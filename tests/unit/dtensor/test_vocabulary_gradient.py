"""Head and embedding add to one float32 gradient: the same that autograd gives, tied or not, in either precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.model import load_model
from nemorl_dtensor.training import DTensorBackend
from nemorl_dtensor.vocabulary_gradient import VocabularyGradient
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from torch import Tensor, nn

from .conftest import Build
from .test_train_step import gradients

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def policy(folder: Path, *, tied: bool, **fields: Any) -> PolicyConfig:
    write_tiny_model(folder, hidden_size=32, intermediate_size=64, tie_word_embeddings=tied)
    return PolicyConfig(model_name=str(folder), init="random", max_grad_norm=1e6, **fields)


def batch_with_padding_token() -> TokenBatch:
    """Token 0, which pads, is also an input."""
    batch = TokenBatch.from_sequences([[0, 9, 9, 30, 0, 12], [40, 9, 41]], [[False] + [True] * 5, [True] * 3])
    return batch.with_tokens(advantages=torch.linspace(-1, 1, batch.num_tokens))


def autograd_gradients(model: Any, batch: TokenBatch) -> dict[str, Tensor]:
    """Those of transformers' own model in float64, one sequence at a time."""
    model = model.double()
    start = 0
    for length in batch.lengths.tolist():
        part = slice(start, start + length)
        ids = batch.token_ids[part]
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None]).squeeze(1)
        weights = (batch["advantages"] * batch.loss_weights)[part][1:]
        (-(logprobs * weights)[batch.mask[part][1:]].sum()).backward()
        start += length
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("microbatch_tokens", [1, 10_000])
def test_it_is_the_gradient_of_autograd(
    tied: bool, precision: Any, tolerance: float, microbatch_tokens: int, tmp_path: Path, weighted_nll: Any
) -> None:
    settings = policy(tmp_path, tied=tied, precision=precision, microbatch_tokens=microbatch_tokens)
    backend = DTensorConfig().build(settings, WorkerContext(seed=3), reference=False)
    assert isinstance(backend, DTensorBackend)
    assert set(backend._gradients) == ({EMBEDDING} if tied else {EMBEDDING, HEAD})
    expected = autograd_gradients(load_model(settings, seed=3), batch_with_padding_token())
    found = gradients(backend, batch_with_padding_token(), weighted_nll)
    assert found.keys() == expected.keys()
    for name in backend._gradients:
        assert found[name].dtype == torch.float32
        assert float((found[name] - expected[name]).norm() / expected[name].norm()) < tolerance, name


def test_autograd_makes_no_gradient_of_them(tmp_path: Path, weighted_nll: Any) -> None:
    settings = policy(tmp_path, tied=True, precision="bfloat16")
    backend = DTensorConfig().build(settings, WorkerContext(seed=3), reference=False)
    assert isinstance(backend, DTensorBackend)
    seen: list[Tensor | None] = []
    backend._trainable[EMBEDDING].register_hook(seen.append)
    backend.train_step(batch_with_padding_token(), weighted_nll)
    assert all(gradient is None for gradient in seen)


def test_frozen_matrices_under_adapters_have_none(build: Build) -> None:
    backend = build(lora={"rank": 2, "alpha": 4})
    assert backend._gradients == {}


def test_what_autograd_adds_to_the_same_parameter_is_kept() -> None:
    master = nn.Parameter(torch.zeros(2, 1))
    gradient = VocabularyGradient(master)
    master.grad = torch.tensor([[1.0], [2.0]])
    gradient()[0] += 10
    gradient.join(master)
    gradient()[1] += 20  # a second microbatch
    gradient.join(master)
    assert master.grad.tolist() == [[11.0], [22.0]]
    gradient.clear()
    master.grad = None
    gradient.join(master)
    assert master.grad is None


def test_a_failed_step_leaves_nothing_behind(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    class FailsAtTheSecond:
        requires = frozenset({"advantages"})
        calls = 0

        def __call__(self, logprobs: Tensor, part: TokenBatch) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("stop")
            return weighted_nll(logprobs, part)

    failed, clean = build(microbatch_tokens=40), build(microbatch_tokens=40)
    with pytest.raises(Exception, match="stop"):
        failed.train_step(batch, FailsAtTheSecond())
    found, expected = (gradients(backend, batch, weighted_nll) for backend in (failed, clean))
    for name in expected:
        assert torch.equal(found[name], expected[name])
