"""Where a trainer and vLLM part: planted bugs on both sides, with real engines on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nemorl.errors import BackendError
from nemorl_testing.models import tiny_model
from planted_bugs import (
    HALVED,
    LAYERS,
    REQUEST,
    Pair,
    build_trainer,
    check_a_swapped_row,
    check_all_plants,
    check_an_ignored_rotary_factor,
)
from recorded_messages import Raises

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

Build = Callable[..., Any]
MODEL = {"num_hidden_layers": LAYERS}


def test_bugs_in_the_trainer_are_found(build: Build) -> None:
    trainer, sampler = build_trainer(), build(tiny_model(**MODEL))
    check_all_plants(trainer, sampler)
    check_a_swapped_row(trainer, sampler)
    assert sampler.generate([REQUEST])[0][0].token_ids  # nothing of it stays behind


@pytest.mark.full
def test_an_ignored_rotary_factor_is_found(build: Build) -> None:
    check_an_ignored_rotary_factor(build(tiny_model(**MODEL), policy={"hf_config_overrides": HALVED}))


@pytest.mark.full
def test_bugs_in_the_engine_are_found(build: Build) -> None:
    trainer, sampler = build_trainer(), build(tiny_model(**MODEL))

    def edit(change: Callable[[Any], None]) -> Any:
        sampler._call(lambda engine: engine.collective_rpc(lambda worker: change(worker.model_runner.model.model)))
        found = Pair.of(trainer, sampler).compare().parting
        assert found is not None
        return found.place.layer, found.place.role, found.position

    def wrong_epsilon(model: Any) -> None:
        model.layers[3].post_attention_layernorm.variance_epsilon = 0.01

    def wrong_scale(model: Any) -> None:
        attention = model.layers[2].self_attn.attn.impl
        attention.scale *= 1.05

    def wrong_rotation(model: Any) -> None:
        model.layers[0].self_attn.rotary_emb.cos_sin_cache[1:] = (
            model.layers[0].self_attn.rotary_emb.cos_sin_cache[:-1].clone()
        )

    assert edit(wrong_epsilon) == (3, "mlp_norm", 0)
    assert edit(wrong_scale) == (2, "heads", 1)
    assert edit(wrong_rotation) == (0, "rotated_query", 1)  # the table is shared, one position late from token 1 on


@pytest.mark.full
def test_an_engine_that_cannot_be_observed_says_why(build: Build, raises: Raises) -> None:
    sampler = build(tiny_model(**MODEL))
    model_config = sampler._call(lambda engine: engine.vllm_config.model_config)
    model_config.enforce_eager = False
    try:
        with raises(BackendError, "compiles", "enforce_eager"):
            sampler.observe(REQUEST)
    finally:
        model_config.enforce_eager = True
