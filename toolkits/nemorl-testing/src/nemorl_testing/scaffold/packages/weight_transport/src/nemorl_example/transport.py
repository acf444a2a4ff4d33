"""The transport: a folder per version, a file per bucket."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemorl.errors import WeightsLostError
from nemorl.weights import Export
from safetensors.torch import load_file, save_file
from torch import Tensor

KEPT_VERSIONS = 2
"""The newest and the one before, which a generator may still be reading."""


class ExampleTransport:
    """Either end. What ``publish`` returns is picklable and tells ``fetch``, in another process, where to look."""

    def __init__(self) -> None:
        self._folders: deque[Path] = deque()

    def publish(self, export: Export) -> list[str]:
        while len(self._folders) >= KEPT_VERSIONS:
            shutil.rmtree(self._folders.popleft(), ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="nemorl-weights-"))
        self._folders.append(folder)
        files = []
        for number, bucket in enumerate(export()):
            files.append(str(folder / f"{number}.safetensors"))
            # Copies where it must: safetensors takes no views and no tensors of a GPU.
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in bucket.items()}, files[-1])
        return files

    def fetch(self, payload: list[str]) -> Iterator[Mapping[str, Tensor]]:
        for file in payload:
            if not Path(file).is_file():
                raise WeightsLostError(
                    f"the trainer's weights are gone: there is no {file}",
                    fix="trainer and generator must see the same temporary folder",
                )
            yield load_file(file)

    def close(self) -> None:
        while self._folders:
            shutil.rmtree(self._folders.popleft(), ignore_errors=True)
