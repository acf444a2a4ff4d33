"""A model as ranks hold it: its sizes, how it is spread, and whether it learns."""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_rl.model_geometry import Geometry


@dataclass(frozen=True)
class HeldModel:
    """One model of a run, on the ranks of one worker group."""

    role: str
    """``policy``, ``critic``, ``teacher``, …"""
    geometry: Geometry
    backend: str
    """``dtensor`` or ``megatron``"""
    element: int
    """Bytes of a weight: 2 in bfloat16, 4 in float32"""
    ranks: int
    microbatch_tokens: int
    """Padded tokens of one forward and backward pass"""
    width: int
    """Tokens of the longest row"""
    learns: bool = True
    has_reference: bool = False
    """Frozen initial weights beside it"""
    value_head: bool = False
    lora_rank: int = 0
    checkpointing: bool = False
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Parts of each pipeline stage"""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    replicas: int = 1
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    muon: bool = False
    on_cpu: bool = False
    cpu_kernels: bool = False
    """On a CPU, in one process: norms in one function, the head's gradient straight into the sums"""
    budget: int = 0
    """Most tokens of a microbatch; ``microbatch_tokens`` is what a step fills of it"""
    accumulates: bool = True
    """A step has more than one microbatch, so gradients of earlier ones wait"""

    @property
    def shards(self) -> int:
        """Data-parallel ranks that divide parameters or optimizer state."""
        return max(1, self.data_parallel // self.replicas)

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of them, that compute different data."""
        return max(1, self.ranks // (self.tensor * self.pipeline * self.context))

    @property
    def expert_padding(self) -> float:
        """FSDP cuts a stack of experts along the experts: fewer of them than shards take memory as if there were as
        many."""
        experts = self.geometry.experts
        return -(-experts // self.shards) * self.shards / experts if experts else 1.0

    @property
    def layer_parameters(self) -> float:
        """Mean of the layers, as FSDP holds them."""
        g = self.geometry
        return g.layer_parameters + (self.expert_padding - 1) * g.expert_parameters / g.layers

    @property
    def held_parameters(self) -> float:
        """Parameters that all shards hold together."""
        return self.parameters + (self.expert_padding - 1) * self.geometry.expert_parameters

    @property
    def parameters(self) -> int:
        return self.geometry.parameters(value_head=self.value_head)

    @property
    def root_parameters(self) -> int:
        """Embedding, output head and last norm: what is in no layer."""
        layers = round(self.geometry.layers * self.geometry.layer_parameters) - self.geometry.hidden
        return self.parameters - layers

    @property
    def adapter_parameters(self) -> float:
        """Of LoRA on every linear layer: rank * (inputs + outputs) each."""
        g = self.geometry
        queries, keys = g.heads * g.head_dim, g.cache_width // 2
        attention = (g.hidden + queries) * 2 + (g.hidden + keys) * 2
        mlp = g.mlp_matrices * (g.hidden + g.ffn)
        return float(self.lora_rank * g.layers * (attention + mlp))
