"""Where a trainer and the generation backend ``megatron`` part, and the training backend ``megatron`` and ``hf``."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.config import GenerationConfig
from nemorl.resources.worker import WorkerContext
from planted_bugs import (
    HALVED,
    Pair,
    build_trainer,
    check_a_swapped_row,
    check_all_plants,
    check_an_ignored_rotary_factor,
    policy,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl_dtensor import HFGenerationConfig
from nemorl_megatron import MegatronGenerationConfig

pytestmark = [pytest.mark.slow, pytest.mark.megatron]


def build_sampler(**changes: Any) -> Any:
    return MegatronGenerationConfig().build(GenerationConfig(), policy(**changes), WorkerContext(), None)


def test_bugs_in_the_trainer_are_found_beside_megatron() -> None:
    trainer, sampler = build_trainer(), build_sampler()
    check_all_plants(trainer, sampler)
    check_a_swapped_row(trainer, sampler)
    sampler.shutdown()


def test_an_ignored_rotary_factor_is_found_beside_megatron() -> None:
    sampler = build_sampler(hf_config_overrides=HALVED)
    check_an_ignored_rotary_factor(sampler)
    sampler.shutdown()


def test_bugs_in_a_megatron_trainer_are_found_beside_hf() -> None:
    trainer = build_trainer(backend="megatron")
    sampler = HFGenerationConfig().build(GenerationConfig(), policy(), WorkerContext(), None)
    pair = Pair.of(trainer, sampler)
    assert pair.compare().parting is None
    layer = trainer._pieces[0].decoder.layers[2]
    sound, layer.input_layernorm._eps = layer.input_layernorm._eps, 0.01
    parting = pair.compare().parting
    assert parting is not None
    assert (parting.place.layer, parting.place.role, parting.position) == (2, "input_norm", 0)
    layer.input_layernorm._eps = sound
    layer.self_attention.core_attention._scale *= 1.05
    parting = pair.compare().parting
    assert parting is not None
    assert (parting.place.layer, parting.place.role, parting.position) == (2, "heads", 1)
    trainer.shutdown()
