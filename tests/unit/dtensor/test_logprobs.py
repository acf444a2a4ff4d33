"""Log-probs of the backend equal those of plain transformers, whatever the architecture and layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError, NemorlError, UsageError
from nemorl_dtensor.model import load_model
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.training import DTensorBackend
from nemorl_dtensor.verification import verify
from nemorl_tensors import TokenBatch
from recorded_messages import Raises
from transformers import AutoConfig, AutoModelForCausalLM

from .conftest import Build, make_batch, plain_logprobs

SMALL = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": False},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {
        **GROUPED,
        "head_dim": 8,
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 3.0,
    },
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "gpt_neox": SMALL,
    "gpt2": {
        "vocab_size": 80,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": SMALL,
    "cohere": {**GROUPED, "logit_scale": 0.5},
    "granite": {**GROUPED, "logits_scaling": 4.0},
    "olmo2": GROUPED,
    "smollm3": GROUPED,
}


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with weights of every kind of model, far enough from zero to tell the formulas apart."""
    config = AutoConfig.for_model(request.param, **ARCHITECTURES[request.param])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    return tmp_path


def test_every_architecture_scores_as_transformers_does(architecture: Path, build: Build) -> None:
    batch = replace(make_batch(), temperature=0.7)
    backend = build(model_name=str(architecture), microbatch_tokens=40)
    attention = "eager" if "gemma2" in str(type(backend._model)).lower() else None
    plain = AutoModelForCausalLM.from_pretrained(architecture, attn_implementation=attention)
    expected = plain_logprobs(plain, batch)
    assert expected[batch.mask].std() > 0.1
    torch.testing.assert_close(backend.get_logprobs(batch), expected, atol=2e-5, rtol=1e-5)


def test_packed_equals_padded(build: Build, batch: TokenBatch) -> None:
    padded, packed = (build(options={"layout": layout}).get_logprobs(batch) for layout in ("padded", "packed"))
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


def test_packed_sequences_do_not_see_each_other(build: Build, batch: TokenBatch) -> None:
    backend = build(options={"layout": "packed"}, microbatch_tokens=10_000)
    other = replace(batch, token_ids=torch.where(batch.sequence_ids == 3, (batch.token_ids + 1) % 80, batch.token_ids))
    before, after = backend.get_logprobs(batch), backend.get_logprobs(other)
    assert torch.equal(before[batch.sequence_ids != 3], after[batch.sequence_ids != 3])
    assert not torch.equal(before, after)


def test_masked_out_slots_are_zero_and_order_is_kept(build: Build, batch: TokenBatch) -> None:
    backend = build(microbatch_tokens=40)
    logprobs = backend.get_logprobs(batch)
    assert torch.equal(logprobs != 0, batch.mask)
    shuffled = [3, 8, 0, 7, 6, 1, 2, 5, 4]
    torch.testing.assert_close(
        backend.get_logprobs(batch.select(shuffled)), batch.with_tokens(lp=logprobs).select(shuffled)["lp"]
    )


def test_chunks_of_the_head_change_nothing(build: Build, batch: TokenBatch) -> None:
    whole = build().get_logprobs(batch)
    torch.testing.assert_close(
        build(options={"logprob_chunk_tokens": 3}).get_logprobs(batch), whole, atol=1e-6, rtol=1e-6
    )


def test_temperature_zero_is_scored_at_one(build: Build, batch: TokenBatch) -> None:
    backend = build()
    assert torch.equal(backend.get_logprobs(replace(batch, temperature=0.0)), backend.get_logprobs(batch))


def test_an_empty_mask_scores_nothing(build: Build, batch: TokenBatch) -> None:
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    assert not build().get_logprobs(nothing).any()


def test_the_head_check_refuses_a_model_with_another_formula(pretrained: Path, raises: Raises) -> None:
    model = load_model(PolicyConfig(model_name=str(pretrained)))
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    scorer = Scorer.find(model)
    with raises(BackendError, varies=r"\d+\.\d+"):
        verify(model, scorer, scorer.score)


def test_bfloat16_scores_close_to_float32_and_in_float32(build: Build, batch: TokenBatch) -> None:
    low, full = build(precision="bfloat16").get_logprobs(batch), build().get_logprobs(batch)
    assert low.dtype == torch.float32
    assert float((low - full).abs().mean()) < 0.05


def test_reference_stays_at_the_initial_weights(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    backend = build(reference=True)
    before = backend.get_logprobs(batch)
    backend.train_step(batch, weighted_nll)
    assert torch.equal(backend.get_logprobs(batch, weights="reference"), before)
    assert not torch.equal(backend.get_logprobs(batch), before)


def test_reference_must_have_been_asked_for(build: Build, batch: TokenBatch, raises: Raises) -> None:
    with raises(UsageError, "reference=True"):
        build().get_logprobs(batch, weights="reference")


def test_random_init_and_the_global_generator_are_seeded(build: Build, tiny: Path, batch: TokenBatch) -> None:
    found = []
    for seed in (1, 1, 2):
        torch.rand(len(found))  # whatever has drawn before
        backend = build(model_name=str(tiny), init="random", seed=seed)
        found.append((backend.get_logprobs(batch), torch.get_rng_state()))
    one, same, other = found
    assert torch.equal(one[0], same[0])
    assert torch.equal(one[1], same[1])
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("name", ["no-such-model-anywhere", "nobody/nothing"])
def test_a_missing_model_is_named(name: str, build: Build, monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with raises(NemorlError, name):
        build(model_name=name)


def test_workers_that_do_not_divide_into_groups_are_refused(pretrained: Path, raises: Raises) -> None:
    from nemorl.resources.worker import WorkerContext
    from nemorl_dtensor import DTensorConfig

    policy = PolicyConfig(model_name=str(pretrained), tensor_parallel_size=2)
    with raises(BackendError, 3, 1, 2):
        DTensorConfig().build(policy, WorkerContext(world_size=3), reference=False)


def test_shutdown_twice_is_harmless(build: Build) -> None:
    backend = build()
    backend.shutdown()
    backend.shutdown()
    assert isinstance(backend, DTensorBackend)
