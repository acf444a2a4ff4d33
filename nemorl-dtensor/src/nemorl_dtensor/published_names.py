"""The weights of a model under the names of published checkpoints, which other programs read, and back.

transformers 5 holds some weights in another form than checkpoints do: all experts of a layer in two tensors, or under
other names. Its own table of these conversions (``transformers.conversion_mapping``) is applied here to weights that
come one by one, so that only what belongs together is in memory together. transformers 4 has no such table, and its
models have the checkpoints' names.
"""

from __future__ import annotations

import copy
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nemorl_tensors.engines.boxes import ViewBox, view_box
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named = tuple[str, Tensor]


class PublishedNames:
    """Both directions for one architecture. Tensors that need no change are passed on as they are."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, torch.Size] | None = None) -> None:
        """
        Args:
            model: The architecture. Made before FSDP2 wraps it: conversions are found by the names of classes.
            shapes: Of the tensors that will be exported. Unset: the model's own.
        """
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()} if shapes is None else shapes
        loading = _transforms(model)
        saving = [transform.reverse_transform() for transform in reversed(loading)]
        self._to_published = _Conversion(model, saving, shapes, reverse=True)
        meta = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        published = {name: tensor.shape for name, tensor in self._to_published.apply(meta)}
        self._from_published = _Conversion(model, loading, published, reverse=False)

    def published(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Weights of the model under the names and in the form of its checkpoints."""
        return self._to_published.apply(tensors)

    def in_memory(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Weights of a checkpoint under the names and in the form of the model; those that have it stay as they are."""
        return self._from_published.apply(tensors)

    def views(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[tuple[str, tuple[int, ...], ViewBox]]]:
        """Published tensors that lie in the memory of one of the model, by its name: their names, shapes and places.

        Those that conversions copy have no place there, and what makes them is left out.
        """
        sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        owners = {source.untyped_storage()._cdata: name for name, source in sources.items()}
        found: dict[str, list[tuple[str, tuple[int, ...], ViewBox]]] = defaultdict(list)
        copied: set[str] = set()
        with _NoCopies():
            made = list(self.published(sources.items()))  # all are kept: an address is then of one tensor alone
        for name, tensor in made:
            owner = owners.get(tensor.untyped_storage()._cdata)
            place = view_box(tensor, shapes[owner]) if owner is not None else None
            if owner is not None and place is not None:
                found[owner].append((name, tuple(tensor.shape), place))
            elif owner is not None:
                copied.add(owner)
        return {owner: views for owner, views in found.items() if owner not in copied}


class _NoCopies(TorchFunctionMode):
    """Within it a view stays one where it would be copied for its layout alone."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


class _Conversion:
    """One direction: which tensors make which."""

    def __init__(
        self, model: PreTrainedModel, transforms: Sequence[Any], shapes: Mapping[str, torch.Size], *, reverse: bool
    ) -> None:
        self._model, self._reverse = model, reverse
        self._renamings, self._converters = _parted(transforms)
        self._sizes: dict[str, int] = defaultdict(int)
        """Tensors that a conversion waits for, by the name it gives its first result."""
        for name in shapes:
            key, pattern = self._renamed(name)
            if pattern is not None:
                self._sizes[key] += 1

    def apply(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Each group of tensors becomes its counterpart as soon as its last one has come; without that it is lost."""
        waiting: dict[str, list[tuple[str, str, Tensor]]] = defaultdict(list)
        for name, tensor in tensors:
            key, pattern = self._renamed(name)
            if pattern is None:
                yield key, tensor
                continue
            waiting[key].append((name, pattern, tensor))
            if len(waiting[key]) == self._sizes[key]:
                yield from self._converted(key, waiting.pop(key))

    def _renamed(self, name: str) -> tuple[str, str | None]:
        if not self._renamings and not self._converters:
            return name, None
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, self._renamings, self._converters, reverse=self._reverse)

    def _converted(self, key: str, group: Sequence[tuple[str, str, Tensor]]) -> Iterator[Named]:
        from transformers.core_model_loading import dot_natural_key

        pattern = group[0][1]
        converter = copy.deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
        # Lists of experts are in the order in which they come.
        for name, found, tensor in sorted(group, key=lambda entry: dot_natural_key(entry[0])):
            converter.add_tensor(key, name, found, tensor)
        for name, made in converter.convert(key, model=self._model, config=self._model.config).items():
            yield name, made[0] if isinstance(made, list) else made


def _transforms(model: PreTrainedModel) -> list[Any]:
    """transformers' conversions from checkpoints of the architecture to its model in memory."""
    if importlib.util.find_spec("transformers.core_model_loading") is None:
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # Neither names of old files nor prefixes that some checkpoints have: what is written has the usual ones. The usual
    # name of a part may have a prefix that the part in memory has not: "vision_tower.vision_model." of CLIP's towers.
    found = get_model_conversion_mapping(model, add_legacy=False)
    usual = [
        transform
        for transform in found
        if not isinstance(transform, PrefixChange) or (transform.scope_prefix and transform.prefix_to_remove)
    ]
    # Undone twice, a renaming that both the whole model and its base have would give a name no checkpoint has.
    whole = {_renaming(transform, "") for transform in usual if transform.scope_prefix is None}
    return [
        transform
        for transform in usual
        if transform.scope_prefix != "" or _renaming(transform, f"{model.base_model_prefix}.") not in whole
    ]


def _renaming(transform: Any, prefix: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Patterns of names, and what takes their place after ``prefix``."""
    return tuple(transform.source_patterns), tuple(prefix + target for target in transform.target_patterns)


def _parted(transforms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those that give new names only, and those that compute."""
    if not transforms:
        return [], []
    from transformers.core_model_loading import WeightConverter

    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    return [transform for transform in transforms if not isinstance(transform, WeightConverter)], converters
