"""The generation backend ``megatron`` in one process: weights that do not fit, models that cannot decode, numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import HFGenerationConfig
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from recorded_messages import Raises
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl_megatron import MegatronGenerationConfig
from nemorl_megatron.bridge.own import OwnBridge
from nemorl_megatron.generation import MegatronGeneration
from nemorl_megatron.parallel import Parallel, Sizes
from nemorl_megatron.rope import Rope, Rotary, rotate
from nemorl_tensors.engines.model_config import read_model_config

pytestmark = pytest.mark.megatron

REQUEST = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=12), (1, 2))
Build = Callable[..., MegatronGeneration]


@pytest.fixture
def build() -> Iterator[Build]:
    """Generators with a model of their own; all are shut down at the end."""
    built: list[Any] = []

    def make(weights: WeightHandle | None = None, **policy: Any) -> Any:
        config = PolicyConfig(model_name=str(tiny_model()), max_sequence_tokens=64, **policy)
        built.append(MegatronGenerationConfig().build(GenerationConfig(), config, WorkerContext(), weights))
        return built[-1]

    yield make
    for engine in built:
        engine.shutdown()


def _handle(tensors: Mapping[str, Tensor], version: int = 1) -> WeightHandle:
    return in_process_handle(lambda: iter([tensors]), version)


def _weights() -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in load_reference(tiny_model()).named_parameters()}


def test_weights_that_do_not_fit_the_model_are_refused(build: Build, raises: Raises) -> None:
    good = _weights()
    norm = "model.norm.weight"
    for change, facts in (
        ({norm: None}, [1, norm]),
        ({norm: torch.ones(3)}, [norm, "[3]"]),
        ({"model.nonsense": torch.ones(3)}, ["model.nonsense", "[3]"]),
    ):
        tensors = {name: tensor for name, tensor in {**good, **change}.items() if tensor is not None}
        with raises(BackendError, *facts):
            build(_handle(tensors))


def test_a_tied_head_may_travel_twice(build: Build) -> None:
    good = _weights()
    assert "lm_head.weight" not in good
    engine = build(_handle({**good, "lm_head.weight": good["model.embed_tokens.weight"]}, 7))
    ((first, _),) = engine.generate([REQUEST])
    expected = response_logprobs(load_reference(tiny_model()), REQUEST.token_ids, first.token_ids)
    assert first.logprobs == pytest.approx(expected, abs=1e-4)
    assert first.weight_versions == (7,)


def test_diverged_weights_are_reported_and_the_engine_survives(build: Build, raises: Raises) -> None:
    good = _weights()
    engine = build(_handle(good))
    engine.update_weights(_handle({**good, "model.norm.weight": good["model.norm.weight"] * torch.nan}), 2)
    with raises(BackendError):
        engine.generate([REQUEST])
    engine.update_weights(_handle(good), 3)
    assert len(engine.generate([REQUEST])[0]) == 2
    engine.shutdown()
    with raises(BackendError):
        engine.generate([REQUEST])


def test_bfloat16_log_probs_are_close_to_a_full_forward_pass(build: Build) -> None:
    engine = build(precision="bfloat16")
    model = load_reference(tiny_model()).to(torch.bfloat16)
    for completion in engine.generate([REQUEST])[0]:
        expected = response_logprobs(model, REQUEST.token_ids, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=0.1)


def test_what_hf_is_given_in_another_form_is_its_own_and_leaves_when_it_sleeps() -> None:
    """Queries, keys and values are one tensor of the trainer, as gates and inputs of the feed-forward layers are."""
    policy = PolicyConfig(model_name=str(tiny_model()), backend="megatron", max_sequence_tokens=64)
    trainer = policy.backend.build(policy, WorkerContext(), reference=False)
    weights = in_process_handle(trainer.export_weights, 1)
    engine: Any = HFGenerationConfig().build(GenerationConfig(), policy, WorkerContext(), weights)
    before = engine.generate([REQUEST])
    held = engine.held_bytes()["weights"]
    apart = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")
    tensors = load_reference(tiny_model()).named_parameters()
    assert held >= sum(tensor.nbytes for name, tensor in tensors if name.endswith(apart))
    engine.sleep(1)
    assert engine.held_bytes()["weights"] == 0
    engine.wake(["weights"])
    assert engine.generate([REQUEST]) == before
    engine.shutdown()
    trainer.shutdown()


def test_a_model_with_another_attention_kernel_is_refused(tmp_path: Path, raises: Raises) -> None:
    policy = PolicyConfig(model_name=str(tiny_model()))
    parallel = Parallel.join(WorkerContext(), Sizes())
    bridge = OwnBridge(policy, read_model_config(policy))
    (piece,) = bridge.build(parallel, dtype=torch.float32, attention="auto", activation_checkpointing=False)
    piece.decoder.layers[0].self_attention.core_attention = torch.nn.Identity()
    with raises(BackendError, "Identity"):
        MegatronGeneration([piece], parallel, bridge, policy, MegatronGenerationConfig())
    with raises(BackendError):
        MegatronGeneration([torch.nn.Identity()], parallel, bridge, policy, MegatronGenerationConfig())
    parallel.leave()


def test_tokens_turn_by_their_position_wherever_they_stand() -> None:
    parallel = Parallel.join(WorkerContext(), Sizes())
    ropes = [Rope(100.0), Rope(10.0, factor=2.0)]
    rotary = Rotary(ropes, 8, "cpu")
    states = torch.randn(6, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    in_order = rotary(torch.arange(6)[:, None], torch.float32)
    places = torch.tensor([[4, 1]])
    single = rotary(places, torch.float32)
    for table in (0, 1):
        turned = rotate(states, *in_order[table])
        angles = torch.outer(torch.arange(6.0), ropes[table].frequencies(8)).repeat(1, 2)[:, None, None]
        half = torch.cat((-states[..., 4:], states[..., :4]), -1)
        torch.testing.assert_close(turned, states * angles.cos() + half * angles.sin())
        newest = torch.stack((states[4, 0], states[1, 1]))[None]
        found = rotate(newest, *single[table])
        torch.testing.assert_close(found[0, 0], turned[4, 0])
        torch.testing.assert_close(found[0, 1], turned[1, 1])
    parallel.leave()
