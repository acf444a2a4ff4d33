"""What is planned: the models of a run, its engines, its devices, and the work of one step."""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_rl.model_geometry import Geometry

from nemorl_plan.devices import Fleet
from nemorl_plan.models import HeldModel


@dataclass(frozen=True)
class Work:
    """One step."""

    sequences: int
    """Responses, or rows of data"""
    prompt_tokens: float
    """Mean"""
    response_tokens: float
    """Mean; of rows of data, the tokens trained on"""
    longest_response: float
    """What the last sequence of a step is expected to take"""
    group: int = 1
    """Responses to one prompt"""
    updates: int = 1
    """Optimizer steps"""
    passes: int = 1
    """Times that each sequence is trained on"""
    scores_old: bool = False
    """Log-probs of the policy before the first update are computed apart"""

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        """Of all sequences."""
        return self.sequences * self.length

    @property
    def sum_len_squared(self) -> float:
        return self.sequences * self.length**2


@dataclass(frozen=True)
class Engines:
    """What samples."""

    backend: str
    """``hf``, ``vllm`` or ``megatron``"""
    geometry: Geometry
    element: int
    replicas: int
    tensor: int
    max_rows: int
    width: int
    """Longest prompt and response"""
    kv_tokens: int | None = None
    """Most tokens kept at once; unset where memory decides"""
    utilization: float | None = None
    """Share of a device that it takes for itself (vLLM)"""
    kv_gib: float | None = None
    """Memory for keys and values in place of that"""
    shares_weights: bool = False
    """It reads the trainer's tensors"""
    is_attached: bool = False
    """It lives in the trainer's processes"""

    @property
    def devices(self) -> int:
        return self.replicas * self.tensor


@dataclass(frozen=True)
class Scene:
    """A run as it is planned."""

    fleet: Fleet
    policy: HeldModel
    others: tuple[HeldModel, ...]
    """Critics and teachers, on the policy's devices"""
    engines: Engines | None
    work: Work
    colocated: bool = True
    is_async: bool = False
    takes_turns: bool = False
    """Whoever is not at work leaves the device's memory"""
    one_process: bool = False
    """Everything shares one process and its allocator"""

    @property
    def training_devices(self) -> int:
        return self.policy.ranks
