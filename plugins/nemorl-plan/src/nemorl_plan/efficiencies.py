"""How much of a device's data sheet real kernels reach: the numbers that ``nemorl plan --from RUN`` refits."""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_rl.memory_plan.scene import Scene


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


CPU = Efficiencies(0.55, 0.6, 0.6, 0.6, 0.7, 2e-4, 1e-3, 1e-3)


def starting_efficiencies(scene: Scene) -> Efficiencies:
    """Those of the kind of device, and of the backends as they describe themselves. Not measured on GPUs by us."""
    if scene.fleet.device.is_cpu:
        return CPU
    training, engines = scene.policy.plan, scene.engines
    layer_s = engines.plan.layer_start_s if engines is not None else 0.0
    step_s = engines.plan.step_start_s if engines is not None else 0.0
    return Efficiencies(training.gpu_frac, 0.45, 0.5, 0.6, 0.7, layer_s, step_s, training.layer_start_s)
