"""Where families of models that see or hear are found. Torch-free: the driver asks here of every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemorl.plugins.slots import Slot

if TYPE_CHECKING:
    from nemorl_media.family import Family

FAMILY: Slot[type[Family]] = Slot("media_family")
"""``of`` a ``model_type`` of transformers."""


def family_of(config: Any, model_name: str, settings: Mapping[str, Any]) -> Family | None:
    """The family of a model; ``None`` for one that reads text alone, or of which no installed package knows more.

    Args:
        config: The model's transformers config.
        model_name: Folder or hub name.
        settings: ``policy.media.processor``.
    """
    found = FAMILY.of(str(config.model_type)).filled()
    return None if found is None else found(config, model_name, settings)
