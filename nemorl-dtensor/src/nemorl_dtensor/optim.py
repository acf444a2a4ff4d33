"""The optimizer over named parameters: clipping, float32 state whatever the precision of the weights.

Weights of lower precision get a float32 master copy that the optimizer updates; the weights are its rounding. Without
it, updates smaller than bfloat16's 8 bits are lost. It begins as the weights were before they were rounded
(``origin``). Gradients of several microbatches add up in float32 too. Which of torch's optimizers updates what is in
``update_rules``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch
from nemorl.config.models import MuonConfig
from nemorl.contracts import AdamStep
from nemorl.errors import CheckpointError, UsageError
from nemorl_tensors.engines.steps import StepResult, schedule_factor
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemorl_dtensor.ranks import like, local, local_gradient
from nemorl_dtensor.update_rules import update_rules
from nemorl_dtensor.vocabulary_gradient import VocabularyGradient

if TYPE_CHECKING:
    from nemorl.config.models import OptimizerConfig, ScheduleConfig


TotalNorm = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(parameters, this rank's gradients of them) -> L2 norm of the whole gradient"""


Refine = Callable[[Mapping[str, Tensor]], None]
"""Fills float32 masters, which are sharded as the parameters are, in place."""


def norm_of_whole(_parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    """L2 norm of gradients that no other rank has a part of."""
    return torch.nn.utils.get_total_norm(list(gradients.values()))


class Optimizer:
    """torch's optimizers with a schedule and clipping."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        schedule: ScheduleConfig,
        max_norm: float | None,
        total_norm: TotalNorm = norm_of_whole,
        matrices: Collection[str] = (),
        gradients: Mapping[str, VocabularyGradient] | None = None,
        refine: Refine | None = None,
    ) -> None:
        """
        Args:
            parameters: What is trained, by name; sharded or whole.
            settings: AdamW's or Muon's.
            schedule: Of the learning rate.
            max_norm: The global gradient norm is clipped to this, where it is set.
            total_norm: Computes that norm from this rank's gradients; with several ranks it adds theirs.
            matrices: Names of hidden layers' matrices, which Muon updates.
            gradients: Of parameters whose gradient, or a part of it, does not come from autograd.
            refine: Gives masters what the rounding of the weights left out. Asked when they are first needed, and not
                where a saved state takes their place.
        """
        self.steps = 0
        """Optimizer steps so far, skipped ones included: the position in the schedule."""
        self.rate_scale = 1.0
        """Multiplies the learning rate of the schedule."""
        self._parameters = dict(parameters)
        # Where a parameter is sharded, all of this class works on this rank's part of it.
        self._masters = {name: _master(parameter) for name, parameter in parameters.items()}
        self._norm = total_norm
        self._settings, self._schedule, self._max_norm = settings, schedule, max_norm
        self._gradients = gradients or {}
        self._refine = refine
        self._rules = update_rules(settings, self._parameters, self._masters, matrices)

    def accumulate(self) -> None:
        """Add the gradients of a microbatch into the float32 ones. Nothing to do where the weights are those."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            grad = local_gradient(parameter).float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None
        for name, gradient in self._gradients.items():
            gradient.join(self._masters[name])

    def step(self, adam: AdamStep | None = None) -> StepResult:
        """Clip, update, publish the masters to the weights, clear the gradients.

        Raises:
            UsageError: ``adam`` is given, and Muon has a part of the weights.
        """
        if adam is not None and isinstance(self._settings, MuonConfig):
            raise UsageError(
                "the values of AdamW cannot be set for a step of Muon", fix="set policy.optimizer: {name: adamw}"
            )
        self._refine_once()
        self.steps += 1
        factor = 1.0 if adam is not None else schedule_factor(self._schedule, self.steps)
        factor *= self.rate_scale
        lr = factor * (self._settings.lr if adam is None else adam.lr)
        max_norm = self._max_norm if adam is None else adam.max_grad_norm
        masters = list(self._masters.values())
        norm = self._norm(self._parameters, self.gathered())
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        if finite:
            if max_norm is not None and grad_norm > max_norm:
                torch.nn.utils.clip_grads_with_norm_(masters, max_norm, norm)
            for rule in self._rules:
                rule.step(factor, adam)
            self._publish()
        self.clear_gradients()
        return StepResult(grad_norm, lr, skipped=not finite)

    def clear_gradients(self) -> None:
        """Forget gradients, e.g. those of a step that failed midway."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None
        for gradient in self._gradients.values():
            gradient.clear()

    def tensors(self) -> dict[str, Tensor]:
        """All state, flat: ``<parameter>.exp_avg``, ``.exp_avg_sq`` and ``.step``, or ``.momentum_buffer``; for low
        precision also ``.master``.

        Of sharded parameters these are DTensors, cut as the parameter is, over the optimizer's own memory.
        """
        self._refine_once()
        found: dict[str, Tensor] = {}
        for rule in self._rules:
            for name in rule.parameters:
                state, master = rule.state(name), self._masters[name]
                if master.dtype != self._parameters[name].dtype:
                    state["master"] = master.detach()
                for key, value in state.items():
                    is_whole = isinstance(value, DTensor) or not value.ndim
                    found[f"{name}.{key}"] = value if is_whole else like(self._parameters[name], value)
        return found

    def gathered(self) -> dict[str, Tensor]:
        """Gradients of masters since the last update, by parameter name: this rank's part of each."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def put_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Take these in place of those that there are."""
        self.clear_gradients()
        for name, gradient in gradients.items():
            self._masters[name].grad = gradient

    def gradients(self) -> list[Tensor]:
        """Those that there are now."""
        found = [tensor.grad for tensor in (*self._parameters.values(), *self._masters.values())]
        return [gradient for gradient in found if gradient is not None]

    def allocate(self, names: Collection[str], steps: int) -> dict[str, Tensor]:
        """Memory for a saved state, to be filled in place: :meth:`tensors` of an optimizer after ``steps`` steps.

        torch allocates it, and does not map it from a file: kernels may round differently on memory that is aligned
        differently.

        Args:
            names: What was saved. A parameter that never had a gradient has no moments.
            steps: Optimizer steps when it was saved.
        """
        self.steps, self._refine = steps, None
        for rule in self._rules:
            rule.allocate(names)
        for name, master in self._masters.items():
            if master.dtype != self._parameters[name].dtype and f"{name}.master" not in names:
                raise CheckpointError(f"no float32 master of {name!r}", fix="resume with the precision that was saved")
        return self.tensors()

    @torch.no_grad()
    def restart(self, steps: int) -> None:
        """Forget all state: masters are the weights as they are, and moments begin at the next step.

        Args:
            steps: Optimizer steps so far, for the schedule.
        """
        self.steps, self._refine = steps, None
        for rule in self._rules:
            rule.allocate(())
        for name, parameter in self._parameters.items():
            if self._masters[name].dtype != parameter.dtype:
                self._masters[name].copy_(local(parameter))

    def _refine_once(self) -> None:
        refine, self._refine = self._refine, None
        if refine is not None:
            copies = ((name, self._masters[name], parameter) for name, parameter in self._parameters.items())
            refine({name: like(p, master.detach()) for name, master, p in copies if master.dtype != p.dtype})

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name].dtype != parameter.dtype:
                local(parameter).copy_(self._masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """What is updated: the parameter, this rank's part of it (the same memory), or a float32 copy of either."""
    if isinstance(parameter, DTensor):
        parameter = nn.Parameter(local(parameter.detach()))
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())
