"""Ranks of a live model keep their own heads and layers of a conversation, and say in its second turn what one says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron_generation import LiveCase, converse_live, write_model
from nemorl.types import Completion
from nemorl_megatron.parallel import Sizes
from spawned import run_calls
from test_megatron_models import COMMON

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

MODELS: Mapping[str, dict[str, Any]] = {
    "qwen2": COMMON,
    # Windows of 6 tokens, capped scores: each has a mask of its own.
    "gemma2": {
        **COMMON,
        "head_dim": 16,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "sliding_window": 6,
    },
}
LAYOUTS = {"tp2": Sizes(tensor=2, sequence_parallel=True), "pp2": Sizes(pipeline=2)}

Found = Mapping[tuple[str, str], list[list[Completion]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Second turns by model and layout; ``anew`` is one process that keeps nothing."""
    torch.set_num_threads(1)
    folders = {name: str(write_model(tmp_path_factory.mktemp(name), name, sizes)) for name, sizes in MODELS.items()}
    alone = [(name, side) for name in MODELS for side in ("anew", "one")]
    calls = [(converse_live, (LiveCase(folders[name], Sizes()), side == "one")) for name, side in alone]
    results = {key: ranks[0] for key, ranks in zip(alone, run_calls(calls, 1), strict=True)}
    spread = [(name, layout) for name in MODELS for layout in LAYOUTS]
    calls = [(converse_live, (LiveCase(folders[name], LAYOUTS[layout]), True)) for name, layout in spread]
    for key, ranks in zip(spread, run_calls(calls, 2), strict=True):
        assert ranks[0] == ranks[1]
        results[key] = ranks[0]
    return results


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_the_second_turn_is_that_of_one_process_which_keeps_nothing(model: str, layout: str, found: Found) -> None:
    for one, other in zip(found[model, layout], found[model, "anew"], strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
