"""Where a model's weights came from, asked once more for what their rounding left out: float32 masters of a bfloat16
model begin as the file has them.

Files are mapped and read tensor by tensor, of a shard its own part alone; what conversions of transformers join is in
memory together, never the model. Random weights are drawn anew on the CPU, by rank 0. A tensor whose rounding is not
the parameter, whatever the reason, is not where the parameter came from: its master stays the parameter itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from nemorl.errors import boundary
from safetensors import safe_open
from torch import Tensor

from nemorl_dtensor.model import load_model
from nemorl_dtensor.ranks import local
from nemorl_dtensor.sharded_weights import copy_part, names_in_files, send_from_rank_0, weights_folder

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts import Head
    from transformers import PreTrainedModel

    from nemorl_dtensor.published_names import PublishedNames

FINER = frozenset({"F16", "F32", "F64"})
"""safetensors' names of the types that hold more of a number than bfloat16."""


@dataclass(frozen=True)
class Origin:
    """Of the weights of one model."""

    policy: TrainingOptions
    model: PreTrainedModel
    names: PublishedNames
    head: Head
    seed: int
    rank: int
    world_size: int
    device: str

    @torch.no_grad()
    def refine(self, masters: Mapping[str, Tensor]) -> None:
        """Give masters that are roundings what was rounded. Collective where the model is sharded.

        Args:
            masters: float32, by parameter, sharded as these are. Those that stay as they are still hold them.
        """
        if not masters:
            return
        parameters = dict(self.model.named_parameters())
        changed = self._drawn(masters) if self.policy.init == "random" else self._read(masters)
        for name in changed:
            master, parameter = local(masters[name]), local(parameters[name])
            if not torch.equal(master.to(parameter.dtype), parameter):
                master.copy_(parameter)

    def _drawn(self, masters: Mapping[str, Tensor]) -> Iterator[str]:
        exact = self.policy.model_copy(update={"precision": "float32"})
        source = dict(load_model(exact, "cpu", self.seed, head=self.head).named_parameters()) if self.rank == 0 else {}
        for name, master in masters.items():
            if self.world_size > 1:
                send_from_rank_0({name: master}, source, self.device, self.rank)
            else:
                copy_part(master, source.pop(name))
            yield name

    def _read(self, masters: Mapping[str, Tensor]) -> Iterator[str]:
        of_file = {other: name for name in masters for other in names_in_files(self.model, name)}
        with boundary(f"reading the weights of model {self.policy.model_name!r} once more"):
            for other, tensor in self.names.in_memory(_stored(weights_folder(self.policy))):
                name = of_file.get(other)
                if name is not None and tensor.shape == masters[name].shape:
                    copy_part(masters[name], tensor)
                    yield name


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model's files that are finer than bfloat16, mapped."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({*json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [path.name for path in sorted(folder.glob("*.safetensors"))]
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                if opened.get_slice(name).get_dtype() in FINER:
                    yield name, opened.get_tensor(name)
