"""How much of a device's data sheet real kernels reach: the numbers that ``nemorl plan --from RUN`` refits."""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_rl.planning.memory.scene import Scene


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
    decode_row_s: float = 0.0
    """Of the host, for each row of a decoding step"""
    mixture_s: float = 0.0
    """Of giving a mixture layer's tokens to its experts and back, forward and backward, whatever the device's speed"""


ROW_S = 4e-5
"""Schedulers are Python: a row's place in the batch, its token and log-prob as objects. From NeMo RL's runs, where a
model takes as long a step on GB200 as on H100, and longer the more rows an engine has (docs/results/planner.md)."""
CPU = Efficiencies(0.55, 0.6, 0.6, 0.6, 0.7, 2e-4, 1e-3, 1e-3)


def starting_efficiencies(scene: Scene) -> Efficiencies:
    """Those of the kind of device, and of the backends as they describe themselves. Not measured on GPUs by us."""
    if scene.fleet.device.is_cpu:
        return CPU
    training, engines = scene.policy.plan, scene.engines
    layer_s = engines.plan.layer_start_s if engines is not None else 0.0
    step_s = engines.plan.step_start_s if engines is not None else 0.0
    mixture_s = scene.policy.spread.mixture_start_s
    return Efficiencies(
        training.gpu_frac, 0.45, 0.5, 0.6, 0.7, layer_s, step_s, training.layer_start_s, ROW_S, mixture_s
    )
