"""Several adapters on one base: each learns as it would alone, whatever the others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.contracts import AdamStep, AdapterShape
from nemorl.errors import BackendError, CheckpointError, ForeignError, UsageError
from nemorl_dtensor.model import load_model
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.model_folder import save_tokenizer
from nemorl_testing.batches import WeightedNLL, ragged_batch
from peft import PeftModel
from recorded_messages import Raises
from torch import Tensor
from transformers import AutoModelForCausalLM

from .conftest import Build

SHAPES = {
    "narrow": AdapterShape(rank=2, alpha=8.0, seed=1, modules=frozenset({"attention"})),
    "wide": AdapterShape(rank=6, alpha=32.0, seed=2, modules=frozenset({"attention", "mlp", "head"})),
}
ADAM = {"narrow": AdamStep(lr=1e-2, weight_decay=0.1), "wide": AdamStep(lr=3e-3, max_grad_norm=0.05)}
LORA = {"rank": 6, "alpha": 32.0, "head": True}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a head of its own."""
    shape, folder = tmp_path_factory.mktemp("shape"), tmp_path_factory.mktemp("untied")
    write_tiny_model(shape, hidden_size=32, intermediate_size=64, tie_word_embeddings=False)
    load_model(PolicyConfig(model_name=str(shape), init="random"), seed=7).save_pretrained(folder)
    save_tokenizer(folder, str(shape))
    return str(folder)


class Fails(WeightedNLL):
    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> Any:
        raise ValueError("on purpose")


def batch_of(name: str, step: int) -> TokenBatch:
    return ragged_batch(seed=step + 10 * list(SHAPES).index(name))


def learn(backend: DTensorBackend, name: str, step: int) -> Tensor:
    """Two passes and an update; log-probs of the second pass."""
    half = batch_of(name, step)
    backend.forward_backward(half.select([0, 1]), WeightedNLL())
    outputs = backend.forward_backward(half.select([2, 3]), WeightedNLL())[1]
    backend.optimizer_step(ADAM[name])
    return outputs


def tensors(backend: DTensorBackend) -> dict[str, Tensor]:
    own = {name: tensor.clone() for bucket in backend.export_adapters() for name, tensor in bucket.items()}
    moments = {name: tensor.clone() for name, tensor in backend._optimizer.tensors().items()}
    return own | moments


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_two_that_take_turns_are_bit_for_bit_what_each_is_alone(dropout: float, untied: str, build: Build) -> None:
    lora = {**LORA, "dropout": dropout}
    alone = {}
    for name, shape in SHAPES.items():
        backend = build(model_name=untied, lora=lora)
        backend.add_adapter(name, shape)
        backend.use_adapter(name)
        said = [learn(backend, name, step) for step in range(3)]
        alone[name] = (said, tensors(backend))

    backend = build(model_name=untied, lora=lora)
    for name, shape in SHAPES.items():
        backend.add_adapter(name, shape)
    backend.add_adapter("third", AdapterShape(rank=1))
    together: dict[str, list[Tensor]] = {name: [] for name in SHAPES}
    for step in range(3):
        # Their passes interleave: gradients of both are there before either is updated.
        for part in ([0, 1], [2, 3]):
            for name in SHAPES:
                backend.use_adapter(name)
                outputs = backend.forward_backward(batch_of(name, step).select(part), WeightedNLL())[1]
                if part == [2, 3]:
                    together[name].append(outputs)
            backend.use_adapter("third")
            with pytest.raises(ForeignError):
                backend.forward_backward(batch_of("narrow", step), Fails())
            backend.clear_gradients()
        for name in reversed(SHAPES):
            backend.use_adapter(name)
            backend.optimizer_step(ADAM[name])
    for name in SHAPES:
        backend.use_adapter(name)
        said, expected = alone[name]
        for one, other in zip(together[name], said, strict=True):
            assert torch.equal(one, other)
        found = tensors(backend)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_it_does_not_have_stays_zero(untied: str, build: Build) -> None:
    backend = build(model_name=untied, lora=LORA)
    backend.add_adapter("narrow", SHAPES["narrow"])
    backend.use_adapter("narrow")
    for step in range(2):
        learn(backend, "narrow", step)
    seen = set()
    for name, parameter in backend._trainable.items():
        rank_first = parameter if ".lora_A." in name else parameter.t()
        assert not rank_first[2:].any()
        if "self_attn" not in name:
            assert not parameter.any()
        seen.add("self_attn" in name and bool(rank_first[:2].any()))
    assert seen == {True, False}


def test_a_new_one_says_what_the_base_says(untied: str, build: Build) -> None:
    backend, batch = build(model_name=untied, lora=LORA, reference=True), ragged_batch()
    learn(backend, "wide", 0)
    backend.add_adapter("wide", SHAPES["wide"])
    backend.use_adapter("wide")
    assert torch.equal(backend.get_logprobs(batch), backend.get_logprobs(batch, "reference"))


@pytest.mark.parametrize("name", SHAPES)
def test_saved_adapters_say_the_same_in_peft(
    name: str, untied: str, build: Build, tmp_path: Path, raises: Raises
) -> None:
    backend = build(model_name=untied, lora=LORA)
    backend.add_adapter(name, SHAPES[name])
    backend.use_adapter(name)
    for step in range(3):
        learn(backend, name, step)
    backend.save_adapters(tmp_path / "adapter")
    plain: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied), str(tmp_path / "adapter"))
    batch = ragged_batch()
    ids = batch.token_ids[: int(batch.lengths[0])]
    with torch.no_grad():
        logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    first = batch.select([0])
    expected = torch.where(first.mask[1:], logprobs, 0.0)
    torch.testing.assert_close(backend.get_logprobs(first)[1:], expected, atol=2e-6, rtol=0)
    assert plain.peft_config["default"].r == SHAPES[name].rank
    # So does another adapter of its shape that takes them, and no other.
    backend.add_adapter("again", SHAPES[name])
    backend.use_adapter("again")
    backend.load_adapter(tmp_path / "adapter")
    torch.testing.assert_close(backend.get_logprobs(first)[1:], expected, atol=2e-6, rtol=0)
    assert backend._optimizer.tensors() == {}
    backend.add_adapter("other", AdapterShape(rank=3))
    backend.use_adapter("other")
    with raises(CheckpointError, 3):
        backend.load_adapter(tmp_path / "adapter")
    backend.use_adapter(name)
    # The merged model is the same.
    backend.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        again = merged(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(again, logprobs, atol=2e-6, rtol=0)


def test_the_gradient_of_adapters_on_the_head_is_that_of_autograd(untied: str, build: Build, tmp_path: Path) -> None:
    """Against peft's own forward pass, over log-softmax of all logits."""
    backend = build(model_name=untied, lora=LORA, max_grad_norm=None)
    learn(backend, "wide", 0)  # so that B is not zero
    backend.save_adapters(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(untied)
    plain: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True)
    batch = ragged_batch()
    loss, start = torch.zeros(()), 0
    for length in batch.lengths.tolist():
        part = slice(start, start + length)
        ids, mask = batch.token_ids[part], batch.mask[part]
        weights = batch.loss_weights[part] * batch["advantages"][part]
        logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        loss = loss - (torch.where(mask[1:], logprobs, 0.0) * weights[1:]).sum()
        start += length
    loss.backward()
    backend.forward_backward(batch, WeightedNLL())
    found = backend._optimizer.gathered()
    expected = {name: p.grad for name, p in base.named_parameters() if p.grad is not None}
    assert {f"lm_head.lora_{factor}.default.weight" for factor in "AB"} <= found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_what_does_not_fit_is_refused(untied: str, build: Build, raises: Raises) -> None:
    backend = build(model_name=untied, lora={"rank": 4})
    with raises(UsageError, 5, 4, "policy.lora.rank"):
        backend.add_adapter("large", AdapterShape(rank=5))
    with raises(UsageError, "head"):
        backend.add_adapter("head", AdapterShape(rank=4, modules=frozenset({"head"})))
    backend.add_adapter("one", AdapterShape(rank=4))
    with raises(UsageError, "one"):
        backend.add_adapter("one", AdapterShape(rank=4))
    with raises(UsageError, "two", "one", "policy"):
        backend.use_adapter("two")
    with raises(UsageError, "policy.lora"):
        backend.remove_adapter("policy")
    with raises(BackendError, "policy.lora.head"):
        build(lora={"head": True})
    with raises(UsageError, "policy.lora"):
        build(model_name=untied).use_adapter("one")
