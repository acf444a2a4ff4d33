"""What migration makes of models that see or hear: the frozen parts, the engine, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import load_config
from nemorl_compat.conversions.generation import NOT_IN_VLLM
from nemorl_compat.conversions.sight import HALF_FROZEN, NOT_SHOWN, WITHIN_TEXT
from nemorl_compat.features import MEDIA_FAMILY, MEDIA_TENSOR_PARALLEL, MEDIA_VALUES
from nemorl_compat.migration import Migration, migrate
from nemorl_compat.seeing import MODELS, SeeingModel, seeing_model
from nemorl_media.sight import freeze
from nemorl_media.slots import family_of
from nemorl_testing.seeing import FAMILIES, tiny_sight
from safetensors.torch import load_file
from torch import nn
from whole_configs import put, whole

QWEN, SMOL, OMNI = "Qwen/Qwen2.5-VL-3B-Instruct", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", "Qwen/Qwen2.5-Omni-3B"
GEMMA, HEARS = "google/gemma-3-4b-it", "Qwen/Qwen2-Audio-7B-Instruct"
IMAGES, SOUNDS = {"dataset_name": "clevr-cogent"}, {"dataset_name": "avqa"}
FREEZE = "policy.dtensor_cfg.automodel_kwargs.freeze_config"
ALL, NONE = ("connector", "tower"), ()
TWO_RANKS = {"policy__dtensor_cfg__tensor_parallel_size": 2, "cluster__gpus_per_node": 2}


def migrated(model: str, train: Any, base: str = "grpo", **changes: Any) -> Migration:
    """A whole config of one model on one dataset, with other values; ``__`` stands for a dot."""
    config = whole(base)
    given = {"policy.model_name": model, "data.train": train, "data.validation": None, "data.default": {}}
    for path, value in (given | {path.replace("__", "."): value for path, value in changes.items()}).items():
        put(config, path, value)
    return migrate(config)


def frozen(model: str, train: Any, freeze_config: Any) -> Migration:
    return migrated(model, train, policy__dtensor_cfg__automodel_kwargs={"freeze_config": freeze_config})


def engine(found: Migration) -> str:
    name: str = load_config(found.config, for_cluster=True).model_dump()["generation"]["backend"]["name"]
    return name


def texts(found: Migration, key: str) -> list[tuple[str, str]]:
    return [(change.outcome.kind, change.outcome.text) for change in found.changes if change.key == key]


@pytest.mark.parametrize(
    ("model", "data", "freeze_config", "train"),
    [
        # Without the section Automodel freezes nothing.
        (QWEN, IMAGES, None, ALL),
        (SMOL, IMAGES, None, ALL),
        # With it, freeze_vision_tower is true unless it says otherwise. Qwen's connector, visual.merger, has "visual".
        (QWEN, IMAGES, {}, NONE),
        (QWEN, IMAGES, {"freeze_vision_tower": True}, NONE),
        (QWEN, IMAGES, {"freeze_audio_tower": True}, NONE),
        (QWEN, IMAGES, {"freeze_vision_tower": False, "freeze_audio_tower": True}, ALL),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", IMAGES, {}, NONE),
        # model.connector and model.multi_modal_projector have none of the words: tower alone.
        (SMOL, IMAGES, {}, ("connector",)),
        (GEMMA, IMAGES, {"freeze_vision_tower": True}, ("connector",)),
        ("llava-hf/llava-1.5-7b-hf", IMAGES, {}, ("connector",)),
        # A model that hears alone has nothing that the default of the other flag freezes.
        (HEARS, SOUNDS, {}, ALL),
        (HEARS, SOUNDS, {"freeze_audio_tower": True}, ("connector",)),
        # audio_tower.proj is within audio_tower.
        (OMNI, SOUNDS, {"freeze_audio_tower": True}, NONE),
        (OMNI, IMAGES, {}, NONE),
        (OMNI, SOUNDS, {}, ALL),
        (OMNI, [IMAGES, SOUNDS], {"freeze_audio_tower": True}, NONE),
        (OMNI, [IMAGES, SOUNDS], {"freeze_vision_tower": False}, ALL),
    ],
)
def test_a_frozen_tower_is_what_automodel_makes_of_it(
    model: str, data: Any, freeze_config: Any, train: tuple[str, ...]
) -> None:
    found = frozen(model, data, freeze_config)
    assert found.is_complete, found.features
    assert load_config(found.config, for_cluster=True).policy.media.train == train


def test_a_tower_that_the_data_does_not_show_anything_is_said_to_be_free() -> None:
    found = frozen(OMNI, SOUNDS, {"freeze_vision_tower": True})
    assert texts(found, f"{FREEZE}.freeze_vision_tower") == [("different", NOT_SHOWN)]
    assert texts(frozen(QWEN, IMAGES, {"freeze_audio_tower": True}), f"{FREEZE}.freeze_audio_tower") == [
        ("neutral", "inactive")
    ]


def test_one_tower_frozen_and_one_not_is_refused() -> None:
    assert frozen(OMNI, [IMAGES, SOUNDS], {}).features == [HALF_FROZEN]  # vision by default, audio not


def test_a_frozen_language_model_is_refused() -> None:
    assert frozen(QWEN, IMAGES, {"freeze_language_model": True}).features == ["frozen parts of a model"]


def test_frozen_towers_mean_nothing_to_a_run_on_text() -> None:
    found = frozen(QWEN, {"dataset_name": "DeepScaler"}, {"freeze_vision_tower": True})
    assert found.is_complete, found.features
    assert texts(found, f"{FREEZE}.freeze_vision_tower") == [("neutral", "inactive")]
    assert "media" not in found.config["policy"]


# The rule on models


WORDS = {"image": ("vision", "visual", "image_encoder"), "audio": ("audio", "audio_encoder", "speech", "sound")}
"""Automodel freezes all parameters of every module whose full name in small letters has one of these."""


def by_words(model: nn.Module, words: Sequence[str]) -> set[str]:
    """Names of the parameters that Automodel freezes."""
    modules = [(name, module) for name, module in model.named_modules() if any(word in name.lower() for word in words)]
    return {f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters()}


def by_us(model: nn.Module, train: Sequence[str]) -> set[str]:
    """Names of those that ``policy.media.train`` leaves out."""
    model.requires_grad_(True)
    family = family_of(model.config, "", {})
    assert family is not None
    freeze(model, family, train)
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    """A tiny model of each family that migration knows."""
    with torch.random.fork_rng(devices=[]):
        return {model.model_type: FAMILIES[model.model_type]()[0] for model in MODELS}


@pytest.mark.slow
@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.model_type)
def test_the_same_parameters_are_frozen_as_by_automodels_words(
    known: SeeingModel, models: dict[str, nn.Module]
) -> None:
    model = models[known.model_type]
    theirs = by_words(model, [word for kind in known.kinds for word in WORDS[kind]])
    assert theirs
    assert by_us(model, known.trained_when_frozen) == theirs
    assert by_us(model, ALL) == set()
    family = family_of(model.config, "", {})
    assert family is not None
    assert family.placeholders.keys() == known.kinds


@pytest.mark.slow
def test_no_setting_freezes_one_of_two_towers(models: dict[str, nn.Module]) -> None:
    model = models["qwen2_5_omni_thinker"]
    ours = [by_us(model, train) for train in chain.from_iterable(combinations(ALL, count) for count in range(3))]
    for words in WORDS.values():
        assert by_words(model, words) not in ours


# Names


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        (QWEN, "qwen2_5_vl"),
        ("Qwen/Qwen2-VL-2B-Instruct", "qwen2_vl"),
        ("Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe"),
        ("Qwen/Qwen3.5-35B-A3B-Base", "qwen3_5_moe"),
        ("Qwen/Qwen3.5-9B", "qwen3_5"),
        (OMNI, "qwen2_5_omni_thinker"),
        (SMOL, "smolvlm"),
        ("HuggingFaceTB/SmolVLM-Instruct", "idefics3"),
        (GEMMA, "gemma3"),
        (HEARS, "qwen2_audio"),
    ],
)
def test_a_family_is_told_by_name(name: str, model_type: str) -> None:
    found = seeing_model(name)
    assert found is not None
    assert found.model_type == model_type


@pytest.mark.parametrize(
    "name",
    [
        "google/gemma-4-E4B-it",
        "google/gemma-3-1b-it",  # reads text alone
        "google/gemma-3n-E2B-it",
        "llava-hf/llava-v1.6-mistral-7b-hf",
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
        "org/model",
    ],
)
def test_a_model_of_no_known_family_is_refused_by_name(name: str) -> None:
    assert frozen(name, IMAGES, None).features == [MEDIA_FAMILY]
    assert frozen(name, IMAGES, {}).features == [MEDIA_FAMILY]


def test_a_config_on_this_machine_has_the_last_word(tmp_path: Path) -> None:
    folder = tmp_path / "qwen2.5-vl"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "smolvlm"}')
    found = seeing_model(str(folder))
    assert found is not None
    assert found.model_type == "smolvlm"
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    assert seeing_model(str(folder)) is None


# The engine, and what is not here


def _families_in_vllm() -> Iterator[str]:
    page = next(parent / "docs/media.md" for parent in Path(__file__).parents if (parent / "docs/media.md").is_file())
    for row in re.findall(r"^\| (`[^|]+)\|.*\| ([^|]+) \|$", page.read_text(), re.MULTILINE):
        if re.match(r"`hf`, `vllm` *$", row[1]):
            yield from re.findall(r"`(\w+)`", row[0])


def test_the_families_in_vllm_are_those_of_the_page() -> None:
    assert sorted(_families_in_vllm()) == sorted(model.model_type for model in MODELS if model.is_in_vllm)


def test_what_vllm_is_not_shown_transformers_samples_and_that_is_said() -> None:
    found = migrated(SMOL, IMAGES)
    assert found.is_complete, found.features
    assert engine(found) == "hf"
    assert texts(found, "policy.generation.backend") == [("different", NOT_IN_VLLM)]
    assert engine(migrated(QWEN, IMAGES)) == "vllm"
    assert engine(migrated(SMOL, {"dataset_name": "DeepScaler"})) == "vllm"


@pytest.mark.parametrize(
    ("base", "model", "data", "changes", "feature"),
    [
        ("grpo", QWEN, SOUNDS, {}, "data with audio for a model that takes image"),
        ("grpo", QWEN, IMAGES, TWO_RANKS, MEDIA_TENSOR_PARALLEL),
        ("ppo", QWEN, IMAGES, {"value__model_name": QWEN}, MEDIA_VALUES),
    ],
)
def test_what_nemorl_does_not_do_with_items_is_refused_by_name(
    base: str, model: str, data: Any, changes: dict[str, Any], feature: str
) -> None:
    assert migrated(model, data, base, **changes).features == [feature]


def test_adapters_within_text_are_a_difference_that_is_said() -> None:
    found = migrated(QWEN, IMAGES, policy__dtensor_cfg__lora_cfg={"enabled": True, "dim": 8, "match_all_linear": True})
    assert found.is_complete, found.features
    assert texts(found, "policy.dtensor_cfg.lora_cfg.enabled") == [("different", WITHIN_TEXT)]
    assert found.config["policy"]["lora"]["rank"] == 8
    assert "media" not in found.config["policy"]


# A run


def shrunk(model: str, folder: Path, freeze_config: Any) -> dict[str, Any]:
    """A migrated recipe, on drawings and one process."""
    small: dict[str, Any] = {
        "policy__precision": "float32",
        "policy__max_total_sequence_length": 256,
        "policy__optimizer__kwargs__lr": 1e-3,
        "policy__generation__backend": "hf",
        "policy__generation__max_new_tokens": 3,
        "policy__dtensor_cfg__automodel_kwargs": {"freeze_config": freeze_config},
        "grpo__num_prompts_per_step": 2,
        "grpo__max_num_steps": 2,
        "policy__train_global_batch_size": 8,
        "checkpointing__enabled": False,
        "checkpointing__checkpoint_dir": str(folder / "run"),
    }
    made = migrated(model, IMAGES, **small)
    assert made.is_complete, made.features
    return {
        **made.config,
        "data": {"name": "drawings"},
        "cluster": {"launcher": "local"},
        "validation": {"every": 0, "at_end": False},
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("freeze_config", "towers_move"), [(None, True), ({}, False)])
def test_a_migrated_recipe_trains_the_parts_that_it_says(tmp_path: Path, freeze_config: Any, towers_move: bool) -> None:
    folder = tiny_sight("qwen2_5_vl")
    trainer = load_config(shrunk(str(folder), tmp_path, freeze_config)).build()
    # Few of four responses are all as long as another: lengths are rewarded, and credited.
    result = trainer.fit(None, lambda prompt, response: float(sum(map(ord, response)) % 7))
    assert result.steps == 2
    before, after = weights(folder), weights(tmp_path / "run" / "model")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" not in name for name in moved)
    assert any("visual" in name and "merger" not in name for name in moved) == towers_move
    assert any("merger" in name for name in moved) == towers_move
