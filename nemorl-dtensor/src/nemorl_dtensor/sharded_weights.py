"""The weights of a sharded model: memory for this rank's part of each tensor, and what belongs there.

A model is built and sharded on torch's meta device, so no rank ever holds all of it. Where the weights come from:

- ``init: pretrained``: each rank reads its own slices of the safetensors files, by torch's distributed checkpoints;
- ``init: random``, and files whose names are not the model's (transformers converts some architectures as it loads
  them) or that lack a value head: rank 0 builds the whole model in CPU memory and sends it tensor by tensor, so that it
  is the same model as in one process;
- adapters: every rank has drawn the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from nemorl.errors import boundary
from nemorl_tensors.engines.model_config import name_or_path
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor

from nemorl_dtensor.model import load_model
from nemorl_dtensor.model_lora import plain_name

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts import Head
    from transformers import PreTrainedModel


def fill(
    model: PreTrainedModel,
    policy: TrainingOptions,
    device: str,
    seed: int,
    adapters: Mapping[str, Tensor],
    rank: int,
    head: Head,
    *,
    parameters_on_host: bool = False,
) -> None:
    """Give a sharded model on the meta device its memory and its weights. Collective.

    Args:
        model: Sharded, on the meta device.
        policy: Which model, and whether its weights are loaded or random.
        device: torch device string of this rank.
        seed: Of ``init: random``.
        adapters: Whole tensors of LoRA adapters, by name.
        rank: Of this process.
        head: What stands on top of the decoder.
        parameters_on_host: They lie in the host's memory, buffers on the device.
    """
    with ties_kept(model):
        model.to_empty(device="cpu" if parameters_on_host else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    _fill_buffers(model)
    missing = dict(saved_tensors(model))
    for name, tensor in adapters.items():
        copy_part(missing.pop(name), tensor)
    folder = weights_folder(policy) if policy.init == "pretrained" else None
    stored = _stored_names(model, missing, folder) if folder is not None else None
    if folder is not None and stored is not None:
        with boundary(f"reading the weights of model {policy.model_name!r}"):
            load_distributed(
                {stored[name]: tensor for name, tensor in missing.items() if name in stored},
                storage_reader=HuggingFaceStorageReader(str(folder)),
            )
    else:
        source = load_model(policy, "cpu", seed, head=head).state_dict() if rank == 0 else {}
        send_from_rank_0(missing, source, device, rank)


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that make the model, by name, sharing its memory: of a tensor that has two names, the first."""
    owned = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    return ((name, tensor) for name, tensor in model.state_dict().items() if name in owned)


@contextmanager
def ties_kept(model: nn.Module) -> Iterator[None]:
    """Within it modules may get new parameters; those that shared one do so again afterwards."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    kept = [*model.parameters()]  # so that no id is used twice
    yield
    del kept
    for (first, first_name), *others in owners.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))


@contextmanager
def hollow(model: nn.Module) -> Iterator[None]:
    """Within it a model on the meta device looks like one on the CPU, each parameter a single zero seen many times.

    For code that works by the device of the parameters; what it adds is real. Afterwards all is on the meta device.
    """
    with ties_kept(model):
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                setattr(module, name, nn.Parameter(zeros, requires_grad=parameter.requires_grad))
        yield
        model.to("meta")


def _fill_buffers(model: PreTrainedModel) -> None:
    """Compute what is computed rather than loaded (rotary frequencies). Parameters are marked as not to be touched."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()  # type: ignore[no-untyped-call]


def weights_folder(policy: TrainingOptions) -> Path:
    """The folder with the files of a policy's weights, downloaded if need be."""
    folder = Path(name_or_path(policy))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    with boundary(f"huggingface_hub, downloading model {policy.model_name!r},"):
        return Path(snapshot_download(policy.model_name, allow_patterns=["*.safetensors"]))


def _stored_names(model: PreTrainedModel, wanted: Mapping[str, Tensor], folder: Path) -> dict[str, str] | None:
    """Name in the files of each tensor; ``None`` where a parameter is not found under any name it could have."""
    known = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    parameters = dict(model.named_parameters())
    stored: dict[str, str] = {}
    for name in wanted:
        found = next((other for other in names_in_files(model, name) if other in known), None)
        if found is not None:
            stored[name] = found
        elif name in parameters:
            return None
    return stored


def names_in_files(model: PreTrainedModel, name: str) -> list[str]:
    """Names that a tensor of the model may have in files: its own, those tied to it, each without the base's prefix."""
    prefix = f"{model.base_model_prefix}."
    tied: dict[str, str] = model.all_tied_weights_keys
    names = [plain_name(name), *(other for other, owner in tied.items() if owner == plain_name(name))]
    return names + [other.removeprefix(prefix) for other in names if other.startswith(prefix)]


def send_from_rank_0(wanted: Mapping[str, Tensor], source: Mapping[str, Tensor], device: str, rank: int) -> None:
    """Fill this rank's parts of ``wanted`` from whole tensors that rank 0 has. Collective."""
    for name, tensor in wanted.items():
        value = source[plain_name(name)].to(device) if rank == 0 else _whole_like(tensor, device)
        dist.broadcast(value, 0)
        copy_part(tensor, value)


def _whole_like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@torch.no_grad()
def copy_part(tensor: Tensor, value: Tensor) -> None:
    """Copy this rank's part of the whole ``value`` into ``tensor``."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(value)
        return
    (part,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    place: Any = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))
    tensor.to_local().copy_(value[place])
