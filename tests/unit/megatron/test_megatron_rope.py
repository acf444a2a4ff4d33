"""Frequencies of rotary embeddings are those of transformers, and of the paper where it can be told by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl_megatron.rope import Rotary, Yarn, rotate
from nemorl_megatron.settings import settings_of
from transformers import Glm4MoeConfig, LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

pytestmark = pytest.mark.megatron

LONG = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = {**LONG, "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.9}
YARNS: dict[str, dict[str, Any]] = {
    "qwen": LONG,
    "two weights of the amplitude": {**DEEPSEEK, "mscale_all_dim": 0.5},
    "one of them": DEEPSEEK,
    "amplitude": {**LONG, "attention_factor": 1.25},
    "fractional ends": {**LONG, "truncate": False, "beta_fast": 20, "beta_slow": 2},
    "all scaled": {**LONG, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize("head", [16, 64, 128])
def test_yarn_is_that_of_transformers(name: str, head: int) -> None:
    config = Qwen2Config(hidden_size=4 * head, num_attention_heads=4, rope_parameters=YARNS[name])
    wanted, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    rope = settings_of(config).rope
    torch.testing.assert_close(rope.frequencies(head), wanted, atol=0, rtol=1e-6)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_yarn_by_hand() -> None:
    # 8 entries, theta 16: frequencies 1, 1/2, 1/4, 1/8. A frequency 16^(-2i/8) turns 64 * 16^(-i/4) / 2 pi times in 64
    # tokens: 8 turns at i = 4 ln(64 / 16 pi) / ln 16 = 0.349, 1 turn at 4 ln(64 / 2 pi) / ln 16 = 3.349. Rounded: 0, 4.
    rope = Yarn(16.0, factor=2.0, low_frequency=1, high_frequency=8, original_length=64)
    # Scaled by 0, 1/4, 1/2, 3/4 of the way to half their value.
    wanted = torch.tensor([1.0, 0.5 * 0.875, 0.25 * 0.75, 0.125 * 0.625])
    torch.testing.assert_close(rope.frequencies(8), wanted, atol=1e-7, rtol=0)
    assert Yarn.usual_amplitude(4.0) == pytest.approx(0.1 * math.log(4.0) + 1)


def test_scores_grow_by_the_square_of_the_amplitude() -> None:
    plain, loud = (Rotary([Yarn(100.0, original_length=64, amplitude=value)], 8, "cpu") for value in (1.0, 1.5))
    vectors = torch.randn(2, 5, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    scores = []
    for rotary in (plain, loud):
        queries, keys = (rotate(part, *rotary(torch.arange(5)[:, None], torch.float32)) for part in vectors)
        scores.append(torch.einsum("sbnd,tbnd->st", queries, keys))
    torch.testing.assert_close(scores[1], 2.25 * scores[0], atol=1e-5, rtol=1e-5)


def test_a_part_of_each_head_is_turned() -> None:
    config = Glm4MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert settings_of(config).rotary == 8
    table = Rotary([settings_of(config).rope], 8, "cpu")(torch.arange(3)[:, None], torch.float32)
    states = torch.randn(3, 1, 2, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(states, *table)
    assert torch.equal(turned[..., 8:], states[..., 8:])
    assert torch.equal(turned[..., :8], rotate(states[..., :8].contiguous(), *table))
    assert settings_of(LlamaConfig(hidden_size=64, num_attention_heads=4)).rotary == 16
