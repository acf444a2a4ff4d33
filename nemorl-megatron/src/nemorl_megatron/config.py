"""What the training backend ``megatron`` can be told, readable where torch and megatron-core are absent.

Tensor parallelism, precision, optimizer and batching are ``policy`` settings, the same for every backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from nemorl.errors import Problem
from nemorl.plugins.kinds import TrainingBackendConfig
from pydantic import Field

AttentionName = Literal["auto", "sdpa", "transformer_engine"]


class MegatronConfig(TrainingBackendConfig):
    """Train a Hugging Face model with megatron-core, spread over many devices in several ways at once."""

    summary: ClassVar[str] = "megatron-core training: tensor, pipeline, context and expert parallelism"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "megatron.core")
    install_hint: ClassVar[str] = "pip install nemorl-megatron"
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process", "nccl", "cuda_ipc", "shared_memory", "object_store")

    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages that the layers are divided into, each on ranks of its own. Raise it when tensor parallelism would have
    to leave the node."""
    virtual_pipeline_parallel_size: int | None = Field(None, ge=2)
    """Parts of each stage, visited in turn: shorter idle times between stages for more communication. Unset: one.
    Needs a pipeline, and layers that divide by stages times parts."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share the tokens of each sequence. Raise it when one sequence does not fit into memory."""
    expert_parallel_size: int = Field(1, ge=1)
    """Ranks that the experts of each mixture-of-experts layer are divided over; taken from the data-parallel ranks."""
    expert_tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that share one expert. 1 is fastest unless a single expert does not fit on a device."""
    sequence_parallel: bool = True
    """With tensor parallelism, also split norms and residuals along the sequence: less memory, same communication.
    Mixtures of experts need it under tensor parallelism."""
    distributed_optimizer: bool = True
    """Divide optimizer state and master weights over the data-parallel ranks instead of copying them to each."""
    attention: AttentionName = "auto"
    """Attention kernel. ``sdpa``: PyTorch's. ``auto``: Transformer Engine's on CUDA where it is installed and computes
    what the model asks for, else PyTorch's."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.virtual_pipeline_parallel_size is not None and self.pipeline_parallel_size == 1:
            yield Problem(
                "virtual_pipeline_parallel_size",
                "there is no pipeline whose stages could be divided",
                "raise pipeline_parallel_size, or remove virtual_pipeline_parallel_size",
            )
