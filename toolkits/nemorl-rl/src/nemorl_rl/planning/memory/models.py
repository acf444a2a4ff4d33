"""A model as ranks hold it: its sizes, how it is spread, and whether it learns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from nemorl_rl.models.divisions import LayerSizes
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.models.routers import names_experts
from nemorl_rl.planning.memory.describing import Spread, TrainingPlan, training_plan
from nemorl_rl.planning.memory.parts import Moments
from nemorl_rl.planning.memory.work import RowLayout, Work

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig

MICROBATCH_TOKENS = {True: 1536, False: 16384}
"""(on the CPU?) -> what backends take at most where none is named (``nemorl_tensors.engines.rows``)."""
SMALLER_BUDGETS = (8192, 4096, 2048, 1024, 512, 256)
"""Tokens of a microbatch that are tried where that many do not fit."""


@dataclass(frozen=True)
class HeldModel:
    """One model of a run, on the ranks of one worker group.

    >>> HeldModel("policy", PolicyConfig(), geometry, ranks=8).fed(work).moments.worst  # doctest: +SKIP
    'output head'
    """

    role: str
    """``policy``, ``critic``, ``teacher``, …"""
    policy: PolicyConfig
    """Its backend, precision, adapters and batching"""
    geometry: Geometry
    ranks: int
    on_cpu: bool = False
    learns: bool = True
    has_reference: bool = False
    """Frozen initial weights beside it"""
    value_head: bool = False
    layout: RowLayout = "padded"
    """How its sequences become rows"""
    microbatch_tokens: int = 0
    """Computed tokens of the fullest microbatch, padding included"""
    accumulates: bool = True
    """A step has more than one microbatch, so gradients of earlier ones wait"""
    default_budget: int | None = None
    """Most tokens of a microbatch where the config names none; unset: as many as a backend takes by itself"""
    longest: int | None = None
    """Tokens of the longest sequence that a step is expected to have; unset: as long as may be"""

    def fed(self, work: Work) -> HeldModel:
        """With what a step really feeds it: rows of a small step do not fill a microbatch."""
        layout = self.plan.row_layout(self, work.sharing)
        rows = work.sequences / max(1, work.updates // work.passes) / self.spread.data
        longest = min(float(self.width), work.prompt_tokens + work.longest_response)
        budget = max(float(self.budget), longest)  # a sequence is never cut
        row = longest if layout == "padded" else work.computed_tokens(layout) / work.sequences
        available = max(longest, max(rows, 1.0) * row)
        tokens = int(min(budget, available))
        accumulates = available > budget
        return replace(self, layout=layout, microbatch_tokens=tokens, accumulates=accumulates, longest=int(longest))

    @cached_property
    def plan(self) -> TrainingPlan:
        """Its backend's account of itself.

        Raises:
            UsageError: It says nothing.
        """
        return training_plan(self.policy.backend)

    @cached_property
    def spread(self) -> Spread:
        return self.plan.spread(self)

    @cached_property
    def moments(self) -> Moments:
        """Memory of its fullest rank."""
        return self.plan.memory(self)

    @property
    def can_leave(self) -> bool:
        """It can leave the devices' memory while others work."""
        return "offload" in self.policy.backend.supports

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return 2 if self.policy.precision == "bfloat16" else 4

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return self.policy.max_sequence_tokens

    @property
    def budget(self) -> int:
        """Most tokens of a microbatch."""
        return self.policy.microbatch_tokens or self.default_budget or MICROBATCH_TOKENS[self.on_cpu]

    @property
    def lora_rank(self) -> int:
        return self.policy.lora.rank if self.policy.lora is not None else 0

    @property
    def checkpointing(self) -> bool:
        return self.policy.activation_checkpointing

    @property
    def tensor(self) -> int:
        return self.policy.tensor_parallel_size

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
        """Of LoRA: rank * (inputs + outputs) of each linear layer, and of each expert, that it is asked for. Of a
        mixture ``all-linear`` is the attention."""
        g, lora = self.geometry, self.policy.lora
        if lora is None:
            return 0.0
        queries, keys = g.hidden + g.heads * g.head_dim, g.hidden + g.cache_width // 2
        dense = (g.layers - g.mixture_layers) * (g.hidden + g.ffn)
        sizes = dict.fromkeys(("q_proj", "o_proj"), g.layers * queries)
        sizes |= dict.fromkeys(("k_proj", "v_proj"), g.layers * keys)
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj")[-g.mlp_matrices :], dense)
        if lora.target_modules == "all-linear":
            asked: Collection[str] = list(sizes)[:4] if g.experts else sizes
        else:
            asked = lora.target_modules
        known = [size for name, size in sizes.items() if name in asked]
        outputs = {"gate_up_proj": 2 * g.expert_ffn, "up_proj": g.expert_ffn, "down_proj": g.expert_ffn}
        experts = [outputs.get(name.rpartition(".")[2], 0) + g.hidden for name in asked if names_experts(name)]
        known += [g.mixture_layers * g.experts * size for size in experts]
        head = lora.head * (g.hidden + g.vocabulary)
        return float(lora.rank * (sum(known or sizes.values()) + head))  # all, where layers have other names


def tensor_sizes(model: HeldModel, per_node: int) -> list[int]:
    """Tensor-parallel sizes that divide the model's heads and MLP and its ranks, within a node."""
    layer = LayerSizes.of(model.geometry, copies_key_values=False)
    return [size for size in (1, 2, 4, 8) if size <= per_node and model.ranks % size == 0 and layer.divide(size)]
