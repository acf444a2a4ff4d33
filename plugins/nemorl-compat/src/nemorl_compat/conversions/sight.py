"""Models that are shown images and sounds: what of them is trained, what samples from them, and what is not here."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.media import MediaKind

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.features import MEDIA_FAMILY, MEDIA_TENSOR_PARALLEL, MEDIA_VALUES
from nemorl_compat.key_table import Outcome
from nemorl_compat.old_config import OldConfig
from nemorl_compat.seeing import SeeingModel, seeing_model

FREEZE = "policy.dtensor_cfg.automodel_kwargs.freeze_config"
FLAGS: Mapping[MediaKind, str] = {"image": "freeze_vision_tower", "audio": "freeze_audio_tower"}
"""Of its section: the tower of each kind is frozen."""
FROZEN_BY_DEFAULT: Mapping[MediaKind, bool] = {"image": True, "audio": False}
"""Where there is a section that does not say. Without a section nothing is frozen."""
WITHIN_TEXT = "adapters sit in the language model alone; towers and connectors stay as they are"
NOT_SHOWN = "it is not frozen here: the data shows it nothing, so that weight decay alone moves it"
HALF_FROZEN = "one frozen tower beside one that is trained (`policy.media.train` is for both: freeze both or none)"


def media(old: OldConfig, new: Pieces) -> None:
    """A model that sees or hears, where its data has images or sounds. On Megatron they are refused as a whole."""
    if not old.asks_for_media or old.get("policy.megatron_cfg.enabled"):
        return
    model = seeing_model(str(old.get("policy.model_name")))
    if model is None:
        new.miss("policy.model_name", MEDIA_FAMILY)
    elif unknown := sorted(old.media_kinds - model.kinds - {"video"}):
        new.miss("policy.model_name", f"data with {' and '.join(unknown)} for a model that takes {model.takes}")
    if old.family in ("ppo", "rm"):
        new.miss("policy.model_name", MEDIA_VALUES)
    if old.whole("policy.dtensor_cfg.tensor_parallel_size", 1) > 1:
        new.miss("policy.dtensor_cfg.tensor_parallel_size", MEDIA_TENSOR_PARALLEL)
    if old.get("policy.dtensor_cfg.lora_cfg.enabled"):
        new.differ("policy.dtensor_cfg.lora_cfg.enabled", WITHIN_TEXT)
    elif old.family != "eval":
        _trained_parts(old, new, model)


def samples_in_vllm(old: OldConfig) -> bool:
    """vLLM is what NeMo RL samples with, and what nemorl can show its model's items in."""
    model = seeing_model(str(old.get("policy.model_name"))) if old.asks_for_media else None
    return old.get("policy.generation.backend", "vllm") == "vllm" and (model is None or model.is_in_vllm)


def _trained_parts(old: OldConfig, new: Pieces, model: SeeingModel | None) -> None:
    """NeMo RL trains the whole model unless ``freeze_config`` freezes parts of it."""
    given = old.get(FREEZE)
    if not isinstance(given, Mapping):
        new.put("policy.media.train", ["connector", "tower"])
        return
    if model is None:
        for flag in FLAGS.values():
            new.miss(f"{FREEZE}.{flag}", MEDIA_FAMILY)
        return
    frozen = {kind for kind, flag in FLAGS.items() if given.get(flag, FROZEN_BY_DEFAULT[kind])}
    for kind in FLAGS.keys() - model.kinds:
        new.findings.setdefault(f"{FREEZE}.{FLAGS[kind]}", Outcome("neutral", "inactive"))
    shown = model.kinds & old.media_kinds or model.kinds
    if shown <= frozen:
        new.put("policy.media.train", list(model.trained_when_frozen))
    elif shown & frozen:
        new.miss(f"{FREEZE}.freeze_vision_tower", HALF_FROZEN)
    else:
        new.put("policy.media.train", ["connector", "tower"])
        for kind in sorted(model.kinds & frozen):
            new.differ(f"{FREEZE}.{FLAGS[kind]}", NOT_SHOWN)
