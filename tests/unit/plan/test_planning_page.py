"""The page about planning: its example backends are described and planned, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.placement.tenants import ROLLOUT, SYNC, TRAIN
from nemorl_rl.planning.devices import parse_fleet
from nemorl_rl.planning.memory.budgets import budgets, settled
from nemorl_rl.planning.memory.engines import Engines
from nemorl_rl.planning.memory.layouts import choices, smallest_change
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import total
from nemorl_rl.planning.memory.scene import Scene
from nemorl_rl.planning.memory.work import Work

PAGE = Path(__file__).parents[3] / "docs/planning.md"
LLAMA = {
    **{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True},
}
"""Llama-3.2-1B: 1,235,814,400 parameters."""


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's Python defines."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return names


def scene(page: dict[str, Any]) -> Scene:
    # The page's class has no entry point, by which configs choose theirs.
    policy = PolicyConfig(max_sequence_tokens=2048).model_copy(update={"backend": page["CopiesConfig"]()})
    work = Work(64, 128, 256, 512, group=8)
    model = HeldModel("policy", policy, Geometry.from_config(LLAMA), ranks=8).fed(work)
    engines = Engines(page["SlowConfig"](), model.geometry, 4, replicas=8, width=2048)
    return settled(Scene(parse_fleet(1, "8xA100"), model, (), engines, work))


def test_the_pages_training_backend_is_planned(page: dict[str, Any]) -> None:
    model = scene(page).policy
    assert model.parameters == 1_235_814_400
    assert total(model.moments.lasting) == 16 * 1_235_814_400
    # Eight rows of at most 640 tokens on each rank; 16 layers keep 4 B x (16 x 2,048 + 4 x 8,192) a token.
    assert model.microbatch_tokens == 8 * 640
    assert model.moments.training["backward"][0].size == 5120 * 16 * 4 * 65536


def test_the_pages_engine_is_planned(page: dict[str, Any]) -> None:
    found = budgets(scene(page))
    assert {ROLLOUT, SYNC, TRAIN} == set(found)
    held = found[ROLLOUT].held_bytes("engine")
    assert held["weights"] == 4 * 1_235_814_400
    # Eight rows of 2,048 tokens; keys and values of 16 layers x 8 heads x 64 in float32.
    assert held["cache"] == 8 * 2048 * 2 * 16 * 512 * 4


def test_what_the_pages_backends_offer_is_what_can_be_chosen(page: dict[str, Any]) -> None:
    found = list(choices(scene(page)))
    keys = {key for choice in found for key, _ in (*choice.training, *choice.sampling)}
    assert keys == {"activation_checkpointing", "microbatch_tokens", "cache_tokens"}
    assert smallest_change(scene(page)) is not None
