"""Which of torch's optimizers updates which parameter: AdamW all of them, or Muon the matrices of hidden layers.

Muon orthogonalizes whole matrices. Where a matrix is sharded, torch's optimizer gets it as the DTensor that it is, over
the memory of this rank's part, and DTensor gathers what the products need.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.config.models import MuonConfig, OptimizerConfig
from nemorl.contracts import AdamStep
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl_dtensor.ranks import like


@dataclass(frozen=True)
class AdamW:
    """AdamW over this rank's parts of some parameters."""

    parameters: Mapping[str, nn.Parameter]
    """Masters, by name"""
    inner: torch.optim.AdamW
    usual: AdamStep
    """At the peak rate"""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @classmethod
    def over(cls, parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, lr: float) -> AdamW:
        groups = [
            # Biases and norms are the parameters with one axis.
            {"params": [p for p in parameters.values() if p.ndim > 1], "decays": True},
            {"params": [p for p in parameters.values() if p.ndim <= 1], "decays": False},
        ]
        groups = [group for group in groups if group["params"]]
        inner = torch.optim.AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=True)
        return cls(parameters, inner, AdamStep(lr, settings.betas, settings.eps, settings.weight_decay))

    def step(self, factor: float, adam: AdamStep | None) -> None:
        """One update, at this fraction of the peak rate; with the values of ``adam`` where it is given."""
        used = adam or self.usual
        for group in self.inner.param_groups:
            group["lr"] = used.lr * factor
            group["betas"], group["eps"] = used.betas, used.eps
            group["weight_decay"] = used.weight_decay if group["decays"] else 0.0
        self.inner.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """Nothing before the first gradient."""
        return dict(self.inner.state.get(self.parameters[name], {}))

    def allocate(self, names: Collection[str]) -> None:
        """Moments in place of those that there are, for the parameters of which ``names`` has any."""
        self.inner.state.clear()
        for name, parameter in self.parameters.items():
            if f"{name}.{self.moments[0]}" in names:
                found = {key: torch.zeros_like(parameter, requires_grad=False) for key in self.moments}
                self.inner.state[parameter] = {"step": torch.zeros((), device=parameter.device), **found}


@dataclass(frozen=True)
class Muon:
    """Muon over matrices."""

    parameters: Mapping[str, nn.Parameter]
    """Masters, by name"""
    matrices: Mapping[str, nn.Parameter]
    """The same memory, as DTensors where it is a part of something"""
    inner: torch.optim.Muon
    lr: float
    """Peak"""

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    @classmethod
    def over(
        cls, parameters: Mapping[str, nn.Parameter], sharded: Mapping[str, nn.Parameter], settings: MuonConfig
    ) -> Muon:
        matrices = {
            name: nn.Parameter(like(sharded[name], p.detach())) if isinstance(sharded[name], DTensor) else p
            for name, p in parameters.items()
        }
        inner = torch.optim.Muon(
            [*matrices.values()],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            ns_steps=settings.newton_schulz_steps,
            adjust_lr_fn=settings.scale,
        )
        return cls(parameters, matrices, inner, settings.lr)

    def step(self, factor: float, _adam: AdamStep | None) -> None:
        """One update, at this fraction of the peak rate."""
        for name, matrix in self.matrices.items():
            grad = self.parameters[name].grad
            if matrix is not self.parameters[name]:
                matrix.grad = None if grad is None else like(matrix, grad)
        for group in self.inner.param_groups:
            group["lr"] = self.lr * factor
        self.inner.step()  # type: ignore[no-untyped-call]
        for name, matrix in self.matrices.items():
            if matrix is not self.parameters[name]:
                matrix.grad = None

    def state(self, name: str) -> dict[str, Tensor]:
        """Nothing before the first gradient."""
        return dict(self.inner.state.get(self.matrices[name], {}))

    def allocate(self, names: Collection[str]) -> None:
        """Moments in place of those that there are, for the parameters of which ``names`` has any."""
        self.inner.state.clear()
        for name, matrix in self.matrices.items():
            if f"{name}.{self.moments[0]}" in names:
                self.inner.state[matrix] = {key: torch.zeros_like(matrix, requires_grad=False) for key in self.moments}


def update_rules(
    settings: OptimizerConfig,
    sharded: Mapping[str, nn.Parameter],
    masters: Mapping[str, nn.Parameter],
    matrices: Collection[str],
) -> tuple[AdamW | Muon, ...]:
    """Every parameter in one of them.

    Args:
        settings: Which, and how.
        sharded: The model's parameters, by name.
        masters: What is updated: their memory, this rank's part of it, or a float32 copy of either.
        matrices: Names of hidden layers' matrices.
    """
    if not isinstance(settings, MuonConfig):
        return (AdamW.over(masters, settings, settings.lr),)
    hidden = {name: masters[name] for name in masters if name in matrices}
    others = {name: masters[name] for name in masters if name not in matrices}
    rules: list[AdamW | Muon] = [Muon.over(hidden, sharded, settings)] if hidden else []
    rules += [AdamW.over(others, settings, settings.adamw_lr or settings.lr)] if others else []
    return tuple(rules)
