"""A base model in 4 bits under adapters: whose numbers it has, how much it takes, what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError, ConfigError
from nemorl.resources.worker import WorkerContext
from nemorl.weights import IN_PROCESS
from nemorl_cli.console import Console
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.model_quantized import packed_layers, quantization
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.parking import bytes_held
from nemorl_tensors.engines.pieces import SpreadHandle
from nemorl_testing.models import tiny_model
from recorded_messages import Raises
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from .conftest import Build, make_batch, plain_logprobs

pytest.importorskip("bitsandbytes", reason='needs bitsandbytes: pip install "nemorl-dtensor[qlora]"')
QLORA = {"rank": 4, "base": "nf4"}
HIDDEN, FFN, LAYERS, KEYS = 64, 128, 2, 32


@pytest.fixture(scope="module")
def model() -> Path:
    """Layers whose inputs are a multiple of 64, the size of a block."""
    return tiny_model(hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS)


def build_on(model: Path, **policy: Any) -> DTensorBackend:
    fields = {"model_name": str(model), "optimizer": {"lr": 1e-2}, "lora": QLORA, **policy}
    backend = DTensorConfig().build(PolicyConfig.model_validate(fields), WorkerContext(), reference=True)
    assert isinstance(backend, DTensorBackend)
    return backend


@pytest.fixture(scope="module")
def of_transformers(model: Path) -> Any:
    """The model as transformers itself loads it in 4 bits. In training mode: no kernel rounds to bfloat16."""
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    settings.bnb_4bit_compute_dtype = torch.float32
    return AutoModelForCausalLM.from_pretrained(model, quantization_config=settings, dtype=torch.float32).train()


@pytest.fixture(scope="module")
def few_tokens() -> TokenBatch:
    return make_batch()


def test_the_base_scores_as_transformers_own_quantised_model(
    model: Path, of_transformers: Any, few_tokens: TokenBatch
) -> None:
    expected = plain_logprobs(of_transformers, few_tokens)
    backend = build_on(model)
    for weights in ("policy", "reference"):  # B starts at zero
        torch.testing.assert_close(backend.get_logprobs(few_tokens, weights), expected, rtol=0, atol=5e-6)
    stored = plain_logprobs(AutoModelForCausalLM.from_pretrained(model).eval(), few_tokens)
    assert (stored - expected).abs().mean() > 1e-2, "4 bits change what the model says"


def test_the_layers_hold_half_a_byte_per_number_and_their_scales(model: Path) -> None:
    numbers = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FFN)
    # Half a byte each, a byte per block of 64, and per layer one float32 per 256 blocks begun.
    scales = numbers // 64 + 4 * LAYERS * sum(
        -(-size // (64 * 256)) for size in (*[HIDDEN * HIDDEN] * 2, *[HIDDEN * KEYS] * 2, *[HIDDEN * FFN] * 3)
    )
    backend = build_on(model)
    layers = packed_layers(backend._model).values()
    held = bytes_held(tensor for layer in layers for tensor in (layer.weight.data, *layer.buffers()))
    assert held == numbers // 2 + scales
    assert backend.held_bytes()["weights"] >= held


def test_adapters_learn_and_the_base_does_not_move(model: Path, few_tokens: TokenBatch, weighted_nll: Any) -> None:
    backend = build_on(model)
    before = backend.get_logprobs(few_tokens, "reference")
    losses = [backend.train_step(few_tokens, weighted_nll)["loss"].value for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3
    assert torch.equal(backend.get_logprobs(few_tokens, "reference"), before)
    assert backend._trainable.keys() == {name for name in backend._trainable if ".lora_" in name}


def test_an_export_is_decoded_and_says_what_the_trainer_says(
    model: Path, few_tokens: TokenBatch, weighted_nll: Any, tmp_path: Path
) -> None:
    some = {**QLORA, "target_modules": ["q_proj", "down_proj"]}  # layers in 4 bits without an adapter are decoded too
    backend = build_on(model, lora=some)
    for _ in range(3):
        backend.train_step(few_tokens, weighted_nll)
    backend.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}
    found = plain_logprobs(plain, few_tokens)
    torch.testing.assert_close(found, backend.get_logprobs(few_tokens), rtol=0, atol=5e-5)


def test_pieces_of_a_base_in_4_bits_are_those_of_its_export(
    model: Path, few_tokens: TokenBatch, weighted_nll: Any
) -> None:
    backend = build_on(model, lora={**QLORA, "target_modules": ["q_proj", "down_proj"]})
    backend.train_step(few_tokens, weighted_nll)
    exported = {name: tensor for bucket in backend.export_weights() for name, tensor in bucket.items()}
    (bucket,) = SpreadHandle(IN_PROCESS, 1, [backend.publish_pieces(IN_PROCESS)]).buckets()
    assert bucket.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(bucket[name], tensor), name


def test_it_continues_from_a_checkpoint_bit_for_bit(
    model: Path, few_tokens: TokenBatch, weighted_nll: Any, tmp_path: Path
) -> None:
    straight = build_on(model)
    straight.train_step(few_tokens, weighted_nll)
    straight.save_checkpoint(tmp_path)
    straight.train_step(few_tokens, weighted_nll)
    resumed = build_on(model)
    resumed.load_checkpoint(tmp_path)
    resumed.train_step(few_tokens, weighted_nll)
    assert torch.equal(resumed.get_logprobs(few_tokens), straight.get_logprobs(few_tokens))


def test_it_leaves_memory_and_comes_back(model: Path, few_tokens: TokenBatch) -> None:
    backend = build_on(model)
    before = backend.get_logprobs(few_tokens)
    backend.offload(["weights"])
    assert backend.held_bytes()["weights"] == 0
    backend.onload(["weights"])
    assert torch.equal(backend.get_logprobs(few_tokens), before)


def test_layers_that_would_be_decoded_wrongly_are_refused(build: Build, raises: Raises) -> None:
    with raises(BackendError, 64, 32, "model.layers.0.self_attn.q_proj"):
        build(lora=QLORA)  # of the tiny model with 32 inputs


def test_without_bitsandbytes_the_error_says_how_to_install_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    policy = PolicyConfig.model_validate({"model_name": str(model), "lora": QLORA})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(BackendError, "nemorl-dtensor[qlora]"):
        quantization(policy)


def test_several_workers_are_refused_by_name() -> None:
    policy = PolicyConfig.model_validate({"model_name": "org/model", "lora": QLORA})
    assert not [*policy.problems(), *DTensorConfig().rank_problems(policy, 1)]
    (problem,) = DTensorConfig().rank_problems(policy, 2)
    assert problem.path == "lora.base"


def run(model: Path, run_dir: Path, **changes: Any) -> Any:
    return nemorl.load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "run_dir": str(run_dir),
            "max_steps": 3,
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "policy": {"max_sequence_tokens": 32, "optimizer": {"lr": 1e-2}, "lora": QLORA},
            "generation": {"max_new_tokens": 8},
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0},
            **changes,
        }
    )


def test_a_run_samples_from_the_model_that_it_trains(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
    config = run(model, tmp_path / "run")
    config.build().fit(rows, lambda prompt, response: float(len(set(response))), console=Console(quiet=True))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    errors = [line["train/token_mult_prob_error"] for line in records if "train/token_mult_prob_error" in line]
    assert len(errors) == 3
    assert max(errors) < 1.001
    assert max(line.get("train/grad_norm", 0.0) for line in records) > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")


def test_adapters_of_a_base_in_4_bits_do_not_travel_alone(model: Path, tmp_path: Path, raises: Raises) -> None:
    pytest.importorskip("nemorl_vllm.config", reason="nemorl-vllm is not installed")
    with raises(ConfigError, 4, path="rollouts.adapters"):
        run(
            model,
            tmp_path,
            generation={"backend": "vllm", "max_new_tokens": 8},
            rollouts={"adapters": "separate"},
        )
