"""Where weights come from, by stored name and slice by slice: files, memory, or a random generator.

No source puts a whole model into memory; files are read slice by slice, random tensors drawn one by one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from nemorl.errors import BackendError, boundary
from safetensors import safe_open
from torch import Tensor

from nemorl_megatron.bridge.rules import Index
from nemorl_megatron.bridge.tables import VALUE_HEAD, weights
from nemorl_megatron.settings import Settings

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Source(Protocol):
    """Tensors under their Hugging Face names."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the tensor of this name; ``None`` if there is none."""
        ...

    def read(self, name: str, index: Index) -> Tensor:
        """A slice of it, on the CPU. An empty index: all of it."""
        ...


class SafetensorsFolder:
    """A Hugging Face model folder. Files are opened when first read, and closed at the end of the ``with`` block."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            BackendError: the folder has no safetensors files.
        """
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / SINGLE).is_file():
            self._files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise BackendError(
                f"{folder} has neither {SINGLE} nor {INDEX}",
                fix="save the model in safetensors format: model.save_pretrained(folder) of transformers does",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.clear()
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._files:
            return None
        return tuple(self._file(self._files[name]).get_slice(name).get_shape())

    def read(self, name: str, index: Index) -> Tensor:
        found: Tensor = self._file(self._files[name]).get_slice(name)[index or ...]
        return found

    def _file(self, file: str) -> Any:
        if file not in self._open:
            with boundary(f"safetensors, opening {self._folder / file},"):
                self._open[file] = self._stack.enter_context(safe_open(self._folder / file, "pt"))
        return self._open[file]


class Tensors:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def read(self, name: str, index: Index) -> Tensor:
        return self._tensors[name][index]


class RandomWeights:
    """Freshly drawn weights: matrices normal, biases zero, norms one. A tensor depends on its name and the seed alone,
    so every layout gets the same model."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._shapes = {
            name: shape
            for weight in weights(settings)
            for name, shape in zip(weight.stored, weight.shapes, strict=True)
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, index: Index) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            is_one = name.endswith("weight") and not self._settings.centered_norms
            return torch.full(shape, float(is_one))[index]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return torch.empty(shape).normal_(std=self._settings.initial_std, generator=generator)[index]


class NewValueHead:
    """A source that may lack a value head, which is then drawn."""

    def __init__(self, source: Source, drawn: RandomWeights) -> None:
        self._source, self._drawn = source, drawn

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._of(name).shape(name)

    def read(self, name: str, index: Index) -> Tensor:
        return self._of(name).read(name, index)

    def _of(self, name: str) -> Source:
        return self._drawn if name == VALUE_HEAD and self._source.shape(name) is None else self._source


def weights_folder(model_name: str) -> Path:
    """The folder of this name, or that which the Hugging Face hub's model of this name was downloaded to."""
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    with boundary(f"huggingface_hub, downloading model {model_name!r},"):
        return Path(snapshot_download(model_name, allow_patterns=["*.safetensors", INDEX]))
