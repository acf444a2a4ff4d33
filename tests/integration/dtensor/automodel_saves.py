"""Checkpoints of mixtures as NeMo RL's DTensor workers leave them: ranks, and ``torch.distributed.checkpoint``.

Workers of version 2 train with Automodel's layers, which hold a rank's experts in one tensor and save each under its
published name (``MoESplitExpertsStateDictMixin``); other tensors are divided by FSDP2. Workers of version 1 save what
transformers holds, also divided by FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nemorl.resources.worker import WorkerContext
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Case:
    """One way to save a model on two ranks."""

    name: str
    model: str
    experts: str
    """``each``: a rank has half of the experts, under their published names; ``parts``: it has half of every expert, of
    expert parallelism with a further division; ``stacked``: transformers' tensors"""
    safetensors: bool = False
    folder: str = ""
    world_size: int = 2


def write(context: WorkerContext, case: Case) -> None:
    """Save a model of transformers: this rank's part."""
    address = f"tcp://{context.master_address}:{context.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=context.rank, world_size=context.world_size)
    mesh = init_device_mesh("cpu", (context.world_size,))

    def divided(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor.clone(), mesh, [Shard(0)])

    state: dict[str, Any] = {}
    for name, tensor in _tensors(case).items():
        number = name.rpartition(".experts.")[2].split(".")[0]
        if case.experts == "each" and number.isdigit():
            if int(number) % context.world_size == context.rank:
                state[name] = tensor.clone()
        else:
            state[name] = divided(tensor)
    if case.safetensors:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(case.folder, save_distributed=True))
    elif case.experts == "stacked":
        dcp.save({"model": state}, checkpoint_id=case.folder)  # version 1
    else:
        dcp.save(state, checkpoint_id=case.folder)
    dist.barrier()
    dist.destroy_process_group()


def _tensors(case: Case) -> Mapping[str, Tensor]:
    if case.experts == "stacked":
        return AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).state_dict()  # type: ignore[no-any-return]
    return load_file(Path(case.model) / "model.safetensors")
