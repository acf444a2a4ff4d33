"""Whatever a config of another system holds: it is translated, or refused by an error of ours that names the key."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import suppress
from typing import Any

import pytest
from nemorl.errors import DataError, NemorlError
from nemorl_compat.key_table import options
from nemorl_compat.migration import migrate
from nemorl_compat.peers.reading import Given
from nemorl_compat.peers.tables import SYSTEMS, table
from nemorl_compat.peers.translation import translate
from whole_configs import put, whole

BASES = {
    "trl": {"model_name_or_path": "org/model"},
    "verl": {"actor_rollout_ref.model.path": "org/model", "algorithm.adv_estimator": "grpo"},
    "openrlhf": {"pretrain": "org/model", "advantage_estimator": "group_norm"},
}
PARTS = 40
"""NeMo RL has 800 options; one part of them is tried in `make test`."""
STRANGE: tuple[Any, ...] = (None, 0, -1, 2.5, math.nan, math.inf, 10**30, "x", "", True, [], [[1]], {"a": 1}, "a,b")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_value_of_an_option_ends_in_another_error(system: str) -> None:
    draw = random.Random(system)
    keys = [key for entry in table(system).entries if "to" in entry.row for key in entry.keys if "*" not in key]
    for key in keys:
        for value in draw.sample(STRANGE, 3):
            with suppress(NemorlError):
                translate(Given(system, {**BASES[system], key: value}, "grpo"))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, PARTS))])
def test_no_value_of_an_option_of_nemo_rl_ends_in_another_error(part: int) -> None:
    draw = random.Random(part)
    for key in sorted(options())[part::PARTS]:
        for base, value in itertools.product(("grpo", "megatron"), draw.sample(STRANGE, 3)):
            config = whole(base)
            put(config, key, value)
            with suppress(NemorlError):
                migrate(config, allow_loss=("*",))


@pytest.mark.parametrize(
    "changes",
    [
        {"policy.tokenizer.chat_template_kwargs": True},
        {"data.default.processor": ["a"]},
        {"data.train.split": [1]},
        {"cluster.gpus_per_node": 0, "policy.generation.vllm_cfg.tensor_parallel_size": 2},
        {"policy.generation.vllm_cfg.tensor_parallel_size": 0},
        {"policy.generation.vllm_kwargs": {"kv_cache_memory_bytes": "much"}},
        {"grpo.invalid_tool_call_advantage": -1.0, "env.nemo_gym.invalid_tool_call_patterns": 3},
        {"policy.megatron_cfg.peft": {"enabled": True, "target_modules": 3}},
        {"policy.megatron_cfg.peft": {"enabled": True, "target_modules": [["linear_qkv"]]}},
    ],
    ids=str,
)
def test_several_strange_values_of_nemo_rl_end_in_no_other_error(changes: dict[str, Any]) -> None:
    for base in ("grpo", "megatron"):
        config = whole(base)
        for key, value in changes.items():
            put(config, key, value)
        with suppress(NemorlError):
            migrate(config, allow_loss=("*",))


@pytest.mark.parametrize(
    ("system", "key", "value"),
    [
        ("trl", "gradient_accumulation_steps", math.inf),
        ("trl", "max_completion_length", 2.5),
        ("verl", "data.max_prompt_length", math.nan),
        ("verl", "actor_rollout_ref.rollout.tensor_model_parallel_size", 0),
    ],
)
def test_what_is_no_number_is_refused_by_its_key(system: str, key: str, value: Any) -> None:
    with pytest.raises(DataError, match=key):
        translate(Given(system, {**BASES[system], key: value}, "grpo"))


@pytest.mark.parametrize(
    ("system", "key"),
    [
        ("trl", "lr_scheduler_type"),
        ("verl", "actor_rollout_ref.actor.loss_agg_mode"),
        ("openrlhf", "actor.loss_agg_mode"),
    ],
)
def test_what_is_no_word_is_a_missing_feature(system: str, key: str) -> None:
    found = translate(Given(system, {**BASES[system], key: ["cosine"]}, "grpo"))
    assert key in {change.key for change in found.changes if change.outcome.kind == "missing"}


def test_weights_that_are_no_numbers_are_refused() -> None:
    given = {"prompt_data": "org/a,org/b", "prompt_data_probs": "much,little"}
    with pytest.raises(DataError, match="much"):
        translate(Given("openrlhf", {**BASES["openrlhf"], **given}, "grpo"))
