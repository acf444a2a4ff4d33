"""Recipes for images and audio: reward functions, datasets, and what is refused by name."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import load_config
from nemorl_compat import legacy_yaml
from nemorl_compat.features import MEDIA, MEDIA_ON_MEGATRON
from nemorl_compat.migration import Migration, migrate
from nemorl_compat.old_config import OldConfig
from whole_configs import put, whole

FORM = {"name": "format", "tags": ["think", "answer"], "credit": "elements", "shares": {"think": 0.25, "answer": 0.75}}
FORM_AND_ANSWER = [{"name": "format", "weight": 0.2}, {"name": "exact_alnum", "weight": 0.8}]


def migrated(base: str = "grpo", **changes: Any) -> Migration:
    """A whole config with other values; ``__`` stands for a dot."""
    config = copy.deepcopy(whole(base))
    put(config, "data.default.prompt_file", None)
    for path, value in changes.items():
        put(config, path.replace("__", "."), value)
    return migrate(config)


def rewarded(functions: Any) -> Migration:
    """A config of text whose environment is a list of reward functions."""
    return migrated(data__default={"env_name": "vlm"}, env__vlm={"num_workers": 8, "reward_functions": functions})


def outcome(found: Migration, key: str) -> tuple[str, str]:
    (change,) = [change for change in found.changes if change.key == key]
    return change.outcome.kind, change.outcome.text


def test_a_list_of_reward_functions_is_a_weighted_sum() -> None:
    found = rewarded(FORM_AND_ANSWER)
    assert found.is_complete, found.features
    assert found.config["environment"] == {
        "name": "weighted",
        "parts": {
            "format": {"environment": FORM, "weight": 0.2},
            "exact_alnum": {"environment": {"name": "exact_alnum"}, "weight": 0.8},
        },
        "lead": "exact_alnum",
    }
    assert outcome(found, "env.vlm.reward_functions") == (
        "different",
        "an element that is empty or occurs twice earns nothing in `format`",
    )
    load_config(found.config, for_cluster=True)


def test_weights_add_up_to_one() -> None:
    parts = rewarded([{"name": "math_expr", "weight": 9}, {"name": "geo3k", "weight": 3}]).config["environment"][
        "parts"
    ]
    assert {name: part["weight"] for name, part in parts.items()} == {"math_expr": 0.75, "geo3k": 0.25}


@pytest.mark.parametrize(
    ("function", "environment"),
    [
        ({"name": "geo3k", "kwargs": {"format_score": 0.1}}, {"name": "geo3k", "format_weight": 0.1}),
        ({"name": "bbox_giou", "kwargs": {"giou_penalty_thres": 0.5}}, {"name": "bbox_giou", "plain_from": 0.5}),
        ({"name": "bbox_giou", "kwargs": {"giou_penalty_thres": 10.0}}, {"name": "bbox_giou"}),
        ({"name": "exact_alnum", "kwargs": {"answer_tag": "final"}}, {"name": "exact_alnum", "tag": "final"}),
        ({"name": "math_expr", "kwargs": None}, {"name": "math_expr"}),
        (
            {"name": "format", "kwargs": {"think_tag": "plan"}},
            {**FORM, "tags": ["plan", "answer"], "shares": {"plan": 0.25, "answer": 0.75}},
        ),
    ],
)
def test_one_reward_function_is_an_environment(function: dict[str, Any], environment: dict[str, Any]) -> None:
    found = rewarded([{**function, "weight": 0.3}])
    assert found.is_complete, found.features
    assert found.config["environment"] == environment
    load_config(found.config, for_cluster=True)


def test_a_function_that_occurs_twice_has_two_names() -> None:
    twice = [{"name": "exact_alnum", "weight": 1, "kwargs": {"answer_tag": tag}} for tag in ("answer", "final")]
    assert list(rewarded(twice).config["environment"]["parts"]) == ["exact_alnum", "exact_alnum_2"]


@pytest.mark.parametrize(
    ("functions", "feature"),
    [
        ([{"name": "clip_score", "weight": 1}], "the reward function clip_score"),
        ([{"name": "geo3k", "weight": 1, "kwargs": {"weight": 2}}], "the argument weight of the reward function geo3k"),
        ([{"name": "geo3k", "weight": 1}, {"name": "format", "weight": -1}], "weights have no sum"),
        ([{"name": "geo3k"}], "weights have no sum"),
        ([], "without a list of reward functions"),
        ("geo3k", "without a list of reward functions"),
    ],
)
def test_what_is_no_list_of_known_functions_is_refused_by_name(functions: Any, feature: str) -> None:
    found = rewarded(functions)
    assert not found.is_complete
    assert any(feature in name for name in found.features)


def test_reward_functions_of_an_environment_that_is_not_used_change_nothing() -> None:
    found = migrated(env={"math": {"num_workers": 8}, "geometry3k": {"num_workers": 8, "reward_functions": "anything"}})
    assert found.is_complete, found.features
    assert outcome(found, "env.geometry3k.reward_functions")[0] == "neutral"


CLEVR = {"dataset_name": "clevr-cogent", "split": "train"}


@pytest.mark.parametrize(
    ("train", "data"),
    [
        (CLEVR, {"preset": "CLEVR-CoGenT", "split": "train", "prompt_template": "{prompt}"}),
        (
            {"dataset_name": "clevr_cogent", "split": "valB"},
            {"preset": "clevr-cogent-valB", "prompt_template": "{prompt}"},
        ),
        ({"dataset_name": "geometry3k"}, {"preset": "Geometry3K", "prompt_template": "{prompt}"}),
        ({"dataset_name": "avqa", "split_validation_size": 0.1}, {"preset": "AVQA", "validation_fraction": 0.1}),
        (
            {"dataset_name": "mmpr-tiny", "download_dir": "results/mmpr", "split_validation_size": 0.008, "seed": 42},
            {"preset": "MMPR-Tiny", "media_folder": "results/mmpr", "validation_fraction": 0.008, "seed": 42},
        ),
        ({"dataset_name": "daily-omni"}, {"preset": "Daily-Omni", "media_folder": "media/dailyomni"}),
        ({"dataset_name": "audiomcq"}, {"preset": "AudioMCQ", "media_folder": "media/audiomcq"}),
        (
            {"dataset_name": "refcoco"},
            {"preset": "RefCOCO", "media_folder": "media/refcoco", "prompt_template": "{prompt}"},
        ),
    ],
)
def test_datasets_are_presets(train: dict[str, Any], data: dict[str, Any]) -> None:
    found = migrated(data__train=train, data__validation=None)
    assert found.config["data"] == {"name": "preset", "chat": True, **data}
    assert list(found.features) == [MEDIA]


def test_a_split_that_is_a_dataset_of_its_own_is_validated_on() -> None:
    found = migrated(data__train=CLEVR, data__validation={"dataset_name": "clevr-cogent", "split": "valA"})
    assert found.config["validation"]["data"]["preset"] == "clevr-cogent-valA"


def test_on_megatron_images_are_refused_by_name() -> None:
    assert MEDIA_ON_MEGATRON in migrated("megatron", data__train=CLEVR, data__validation=None).features
    assert MEDIA_ON_MEGATRON in migrated("megatron", policy__is_vlm=True).features
    assert MEDIA_ON_MEGATRON not in migrated("grpo", data__train=CLEVR, data__validation=None).features
    assert MEDIA_ON_MEGATRON not in migrated("megatron").features


FREEZE = "policy.dtensor_cfg.automodel_kwargs.freeze_config"


def test_frozen_towers_mean_nothing_to_a_run_on_text() -> None:
    frozen = {"freeze_vision_tower": True, "freeze_audio_tower": True, "freeze_language_model": False}
    found = migrated(policy__dtensor_cfg__automodel_kwargs={"freeze_config": frozen})
    assert found.is_complete, found.features
    assert outcome(found, f"{FREEZE}.freeze_vision_tower")[0] == "neutral"
    with_images = migrated(
        data__train=CLEVR, data__validation=None, policy__dtensor_cfg__automodel_kwargs={"freeze_config": frozen}
    )
    assert outcome(with_images, f"{FREEZE}.freeze_vision_tower") == ("missing", MEDIA)


def test_limits_of_images_reach_the_engine_from_where_nemo_rl_reads_them() -> None:
    found = migrated(
        policy__generation__vllm_kwargs={"limit_mm_per_prompt": {"image": 2, "video": {"count": 1}}},
        policy__generation__vllm_cfg__limit_mm_per_prompt={"audio": 1},
    )
    assert found.is_complete, found.features
    given = found.config["generation"]["backend"]["engine_args"]
    assert given == {"limit_mm_per_prompt": {"image": 2, "video": {"count": 1}}}
    assert outcome(found, "policy.generation.vllm_cfg.limit_mm_per_prompt.audio")[0] == "neutral"


BESIDE = [parent / "shared/reference/nemo-rl-configs" for parent in Path(__file__).parents]
GIVEN = [Path(os.environ["NEMO_RL_CONFIGS"])] if "NEMO_RL_CONFIGS" in os.environ else BESIDE
RECIPES = [
    path
    for folder in GIVEN
    if folder.is_dir()
    for path in sorted(folder.rglob("*.yaml"))
    if re.search("vlm|audio|omni|mmau", path.name)
]


@pytest.mark.skipif(not RECIPES, reason="no configs of NeMo RL here (NEMO_RL_CONFIGS)")
def test_of_the_recipes_those_on_megatron_are_refused_for_that_and_the_others_for_images_alone() -> None:
    known: dict[Path, dict[str, Any]] = {}
    counts = {True: 0, False: 0}
    for path in RECIPES:
        data = legacy_yaml.read(path, known)
        old = OldConfig(data)
        if old.asks_for_media:
            is_megatron = bool(old.get("policy.megatron_cfg.enabled"))
            counts[is_megatron] += 1
            features = migrate(data, folders=(path.parents[2], *path.parents)).features
            assert (MEDIA_ON_MEGATRON in features) == is_megatron, path
            assert MEDIA in features, path
    assert counts[True] > counts[False] > 0
