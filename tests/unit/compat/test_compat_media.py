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
from nemorl_compat.features import FILMS, MEDIA_FAMILY, MEDIA_ON_MEGATRON
from nemorl_compat.migration import Migration, migrate
from nemorl_compat.old_config import OldConfig, is_fragment
from whole_configs import put, whole

FORM = {"name": "format", "tags": ["think", "answer"], "credit": "elements", "shares": {"think": 0.25, "answer": 0.75}}
WORDS = "words that are never generated"
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


SEES, HEARS = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2-Audio-7B-Instruct"
CLEVR = {"dataset_name": "clevr-cogent", "split": "train"}


@pytest.mark.parametrize(
    ("model", "train", "data"),
    [
        (SEES, CLEVR, {"preset": "CLEVR-CoGenT", "split": "train", "prompt_template": "{prompt}"}),
        (
            SEES,
            {"dataset_name": "clevr_cogent", "split": "valB"},  # all its rows are in the hub's split `train`
            {"preset": "clevr-cogent-valB", "split": "train", "prompt_template": "{prompt}"},
        ),
        (SEES, {"dataset_name": "geometry3k"}, {"preset": "Geometry3K", "prompt_template": "{prompt}"}),
        (HEARS, {"dataset_name": "avqa", "split_validation_size": 0.1}, {"preset": "AVQA", "validation_fraction": 0.1}),
        (
            SEES,
            {"dataset_name": "mmpr-tiny", "download_dir": "results/mmpr", "split_validation_size": 0.008, "seed": 42},
            {"preset": "MMPR-Tiny", "media_folder": "results/mmpr", "validation_fraction": 0.008, "seed": 42},
        ),
        (HEARS, {"dataset_name": "audiomcq"}, {"preset": "AudioMCQ", "media_folder": "media/audiomcq"}),
        (
            SEES,
            {"dataset_name": "refcoco"},
            {"preset": "RefCOCO", "media_folder": "media/refcoco", "prompt_template": "{prompt}"},
        ),
    ],
)
def test_datasets_are_presets(model: str, train: dict[str, Any], data: dict[str, Any]) -> None:
    vlm = {"processor": "vlm_hf_data_processor", "env_name": "math", "prompt_file": None}
    found = migrated(policy__model_name=model, data__train=train, data__validation=None, data__default=vlm)
    assert found.is_complete, found.features
    assert found.config["data"] == {"name": "preset", "chat": True, **data}
    assert outcome(found, "data.default.processor")[0] == "neutral"


def test_a_dataset_with_films_is_refused_for_them() -> None:
    found = migrated(
        policy__model_name="Qwen/Qwen2.5-Omni-7B",
        data__train={"dataset_name": "daily-omni"},
        data__validation=None,
        policy__tokenizer={"video": {"num_frames": 32}},
    )
    assert found.features == [FILMS]
    assert outcome(found, "policy.tokenizer.video.num_frames") == ("missing", FILMS)
    shown_images = migrated(policy__model_name=SEES, data__train=CLEVR, policy__tokenizer={"video": {"num_frames": 32}})
    assert outcome(shown_images, "policy.tokenizer.video.num_frames")[0] == "neutral"


def test_a_split_that_is_a_dataset_of_its_own_is_validated_on() -> None:
    found = migrated(data__train=CLEVR, data__validation={"dataset_name": "clevr-cogent", "split": "valA"})
    assert found.config["validation"]["data"]["preset"] == "clevr-cogent-valA"


@pytest.mark.parametrize(
    ("data", "train", "held_out"),
    [
        # f0b1a91d, prepare_clevr_cogent_dataset: each split came with the scenes to validate on
        ({"dataset_name": "clevr-cogent", "split": "trainA"}, ("CLEVR-CoGenT", "train"), "clevr-cogent-valA"),
        ({"dataset_name": "clevr-cogent", "split": "trainB"}, ("CLEVR-CoGenT", "train"), "clevr-cogent-valB"),
        ({"dataset_name": "clevr-cogent"}, ("CLEVR-CoGenT", None), "clevr-cogent-valA"),
        ({"dataset_name": "geometry3k", "split": "train"}, ("Geometry3K", "train"), None),
        ({"dataset_name": "refcoco", "split": "default"}, ("RefCOCO", "train"), None),
    ],
)
def test_until_january_datasets_came_with_rows_to_validate_on(
    data: dict[str, Any], train: tuple[str, str | None], held_out: str | None
) -> None:
    found = migrated("january", policy__model_name=SEES, data=data).config
    assert (found["data"]["preset"], found["data"].get("split")) == train
    if held_out is None:
        assert found["data"]["validation_split"] == "validation"
    else:
        assert found["validation"]["data"]["preset"] == held_out
    assert found["validation"].get("every") != 0  # which would turn validation off


def test_an_evaluation_of_sounds_reads_the_split_that_it_names() -> None:
    audio = {"dataset_name": "TwinkStart/MMAU", "split": "v05.15.25", "prompt_file": None, "env_name": "vlm"}
    found = migrated(
        "eval",
        generation__model_name="Qwen/Qwen2.5-Omni-3B",
        tokenizer__name="Qwen/Qwen2.5-Omni-3B",
        data=audio,
        env={"vlm": {"num_workers": 8, "reward_functions": [{"name": "exact_alnum", "weight": 1.0}]}},
    )
    assert found.is_complete, found.features
    assert found.config["data"] == {"name": "preset", "preset": "MMAU", "validation_split": "v05.15.25", "chat": True}
    assert found.config["environment"] == {"name": "exact_alnum"}
    load_config(found.config, for_cluster=True)


def test_on_megatron_images_are_refused_by_name() -> None:
    assert migrated("megatron", data__train=CLEVR, data__validation=None).features == [MEDIA_ON_MEGATRON]
    gym = {"policy__is_vlm": True, "env__should_use_nemo_gym": True}
    assert MEDIA_ON_MEGATRON in migrated("megatron", **gym).features
    assert MEDIA_ON_MEGATRON not in migrated("megatron", policy__is_vlm=True).features  # read by NeMo-Gym alone
    assert MEDIA_ON_MEGATRON not in migrated("grpo", data__train=CLEVR, data__validation=None).features
    assert MEDIA_ON_MEGATRON not in migrated("megatron").features


def test_chat_templates_of_a_tokenizer_are_not_read_where_the_processor_writes() -> None:
    """NeMo RL sets them on the tokenizer and lets the processor write, which has a template of its own."""
    template = "{{ messages[0].content.strip() }}"  # of a list of parts it would be an error
    given = {"chat_template": template, "chat_template_kwargs": {"enable_thinking": False}}
    found = migrated(policy__model_name=SEES, data__train=CLEVR, policy__tokenizer=given)
    assert "tokenizer" not in found.config["policy"]
    for key in ("chat_template", "chat_template_kwargs.enable_thinking"):
        assert outcome(found, f"policy.tokenizer.{key}") == ("neutral", "unread")
    # The processor of Qwen3.5 has none, and is given that of the tokenizer.
    other = migrated(policy__model_name="Qwen/Qwen3.5-9B", data__train=CLEVR, policy__tokenizer=given)
    assert other.config["policy"]["tokenizer"]["chat_template"] == template
    text = migrated(policy__model_name=SEES, policy__tokenizer=given)
    assert text.config["policy"]["tokenizer"]["chat_template"] == template


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


VERDICTS = {
    "vlm_grpo_3B.yaml": [],
    "vlm_grpo-qwen2.5-vl-3b-instruct-clevr-1n4g-dtensor2tp1.v1.yaml": [],
    "vlm_grpo-qwen2.5-vl-3b-instruct-clevr-1n8g-dtensor2tp1.v1.yaml": [],
    "sft_vlm_3B.yaml": [],
    "mmau.yaml": [],
    "sft_avlm.yaml": ["data with audio for a model that takes image", FILMS],
    "daily_omni.yaml": [FILMS],
    "vlm_grpo-gemma4-e4b-geo3k-1n8g-automodel.yaml": [MEDIA_FAMILY],
    "vlm_grpo-qwen3.5-35ba3b-geo3k-2n8g-automodel-ep16.yaml": [],
    "vlm_grpo-nemotron-omni-30ba3b-clevr-1n8g-automodel-ep8.v1.yaml": [MEDIA_FAMILY, WORDS],
    "vlm_grpo-nemotron-omni-30ba3b-mmpr-4n8g-automodel-ep8.v1.yaml": [MEDIA_FAMILY, WORDS],
}
"""All configs of NeMo RL's repository at 7ea279ab that train on, or are evaluated on, media without Megatron; of the
files beside the project it has one, of either commit."""


@pytest.mark.slow
@pytest.mark.skipif(not RECIPES, reason="no configs of NeMo RL here (NEMO_RL_CONFIGS)")
def test_each_recipe_loads_or_is_refused_for_what_is_missing() -> None:
    known: dict[Path, dict[str, Any]] = {}
    found: dict[bool, list[str]] = {True: [], False: []}
    for path in RECIPES:
        data = legacy_yaml.read(path, known)
        if is_fragment(data) or not (old := OldConfig(data)).asks_for_media:
            continue
        is_megatron = bool(old.get("policy.megatron_cfg.enabled"))
        made = migrate(data, folders=(path.parents[2], *path.parents))
        found[is_megatron].append(path.name)
        assert (MEDIA_ON_MEGATRON in made.features) == is_megatron, path
        if not is_megatron:
            assert made.features == VERDICTS[path.name], path
            if made.is_complete:
                load_config(made.config, for_launch=True, for_cluster=True)
    assert "vlm_grpo_3B.yaml" in found[False]
    assert len(found[True]) > 5
