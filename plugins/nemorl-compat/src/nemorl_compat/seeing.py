"""Models that see or hear, by name: a config of NeMo RL says no more of them, and what it asks for depends on them.

Names of modules and tensors are those of transformers. Not here: how a family sees (``nemorl_media``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nemorl.media import MediaKind
from nemorl.plugins import registry
from nemorl_rl.models.model_files import stored_config

IMAGE, AUDIO = frozenset[MediaKind](["image"]), frozenset[MediaKind](["audio"])
Part = Literal["connector", "tower"]


@dataclass(frozen=True)
class SeeingModel:
    """One family of models."""

    model_type: str
    """Of transformers, as the slot ``media_family`` has it"""
    names: str
    """Regular expression that is in names of its models, in small letters"""
    kinds: frozenset[MediaKind] = IMAGE
    """Of what it is shown"""
    has_connector_inside: bool = False
    """The connector is a part of the tower, by its name too"""
    is_in_vllm: bool = False
    """nemorl shows it items in vLLM"""
    has_own_template: bool = True
    """Its processor brings a chat template; else it takes that of the tokenizer"""

    @property
    def takes(self) -> str:
        """``image and audio``."""
        return " and ".join(sorted(self.kinds, reverse=True))

    @property
    def trained_when_frozen(self) -> tuple[Part, ...]:
        """``policy.media.train`` for Automodel's frozen tower.

        ``freeze_config`` freezes every module that has "vision", "visual" or "image_encoder" in its full name (of
        towers that hear "audio", "speech" or "sound"), so that a connector within the tower is frozen with it.
        Source: ``apply_parameter_freezing`` of ``nemo_automodel/components/utils/model_utils.py`` at 24b47e85.
        """
        return () if self.has_connector_inside else ("connector",)


MODELS = (
    SeeingModel("qwen2_5_omni_thinker", r"qwen2\.5-omni", IMAGE | AUDIO, has_connector_inside=True),
    SeeingModel("qwen2_5_vl", r"qwen2\.5-vl", has_connector_inside=True, is_in_vllm=True),
    SeeingModel("qwen2_vl", r"qwen2-vl", has_connector_inside=True, is_in_vllm=True),
    SeeingModel("qwen3_vl_moe", r"qwen3-vl-.*-a\d+b", has_connector_inside=True, is_in_vllm=True),
    SeeingModel("qwen3_vl", r"qwen3-vl", has_connector_inside=True, is_in_vllm=True),
    SeeingModel("qwen3_5_moe", r"qwen3\.5-.*-a\d+b", has_connector_inside=True, has_own_template=False),
    SeeingModel("qwen3_5", r"qwen3\.5", has_connector_inside=True, has_own_template=False),
    SeeingModel("smolvlm", r"smolvlm2"),
    SeeingModel("idefics3", r"smolvlm|idefics3"),
    SeeingModel("llava", r"llava-(v)?1\.5"),
    SeeingModel("gemma3", r"gemma-3-(4|12|27)b"),
    SeeingModel("qwen2_audio", r"qwen2-audio", AUDIO),
)
"""The first whose names fit."""
TYPES = {"qwen2_5_omni": "qwen2_5_omni_thinker"}
"""Other types of a whole model than of what is trained of it."""


def seeing_model(name: str) -> SeeingModel | None:
    """The family of a model; ``None`` where no installed package has it, or nobody can tell.

    Args:
        name: Folder or hub name. A ``config.json`` that is on this machine has the last word.
    """
    stored = stored_config(name)
    if stored is None:
        found = next((model for model in MODELS if re.search(model.names, name.lower())), None)
    else:
        model_type = str(stored.get("model_type"))
        found = next((model for model in MODELS if model.model_type == TYPES.get(model_type, model_type)), None)
    is_installed = found is not None and f"media_family.{found.model_type}" in registry().index.slots
    return found if is_installed else None
