"""How much of a device's data sheet real kernels reach: the numbers that ``nemorl plan --from RUN`` refits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiencies:
    """Shares of the peak, 0 to 1, and times that no roofline has."""

    training: float
    """Of the matrix products of forward and backward passes"""
    scoring: float
    """Of forward passes without gradient"""
    prefill: float
    decode: float
    """Of the memory's bandwidth while decoding"""
    links: float
    """Of NVLink, PCI Express and network"""
    decode_layer_s: float
    """Of starting one layer's kernels, per decoding step"""
    decode_step_s: float
    """Of one decoding step besides: sampling, scheduling"""
    microbatch_s: float
    """Of starting one layer's forward and backward pass"""


GPU: Mapping[str, Efficiencies] = {
    "dtensor": Efficiencies(0.40, 0.45, 0.5, 0.6, 0.7, 0.0, 0.0, 1.5e-3),
    "megatron": Efficiencies(0.42, 0.45, 0.5, 0.6, 0.7, 0.0, 0.0, 1e-3),
}
"""Training backend -> shares. Llama 3 (arXiv:2407.21783, table 4) reaches 0.38 to 0.43 in training with all overlaps;
Megatron-LM (arXiv:2205.05198, table 5) 0.42 to 0.56. Not measured on GPUs by us: refit them."""
CPU = Efficiencies(0.55, 0.6, 0.6, 0.6, 0.7, 2e-4, 1e-3, 1e-3)
STARTING: Mapping[str, tuple[float, float]] = {"vllm": (0.0, 3e-3), "hf": (3e-4, 2e-3), "megatron": (4e-4, 3e-3)}
"""Generation backend -> seconds of a decoding step on a GPU (per layer, besides): vLLM replays CUDA graphs, the others
start each kernel from Python."""
