"""Gradients of all microbatches and ranks, and AdamW over them: megatron-core's, told to add and never to divide.

Gradients add up in float32 buffers, masters and moments are float32 whatever the precision of the weights; with
``distributed_optimizer`` each data-parallel rank keeps a range of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from nemorl.contracts import AdamStep
from nemorl.metrics import Mean
from nemorl_tensors.engines.steps import StepResult, schedule_factor
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from nemorl.config.models import TrainingOptions

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Share:
    """This rank's share of one parameter, which it updates: a range of its elements, counted in memory order."""

    start: int
    master: Tensor
    """float32; the parameter's own memory where that is float32"""
    _inner: Any
    """The torch optimizer that updates it."""

    def moments(self) -> dict[str, Tensor]:
        """By name; nothing before the first update."""
        state = self._inner.state.get(self.master, {})
        return {name: state[name] for name in MOMENTS if name in state}

    def allocate_moments(self, updates: int) -> dict[str, Tensor]:
        """Moments to be filled in place, of an optimizer after this many updates: none before the first."""
        if updates == 0:
            self._inner.state.pop(self.master, None)
            return {}
        found = {name: torch.zeros_like(self.master, requires_grad=False) for name in MOMENTS}
        # torch counts updates by parameter, NVIDIA's fused AdamW by group: each reads its own.
        self._inner.state[self.master] = {"step": torch.tensor(float(updates)), **found}
        for group in self._inner.param_groups:
            group["step"] = updates
        return found


class Learner:
    """The trained model's gradient buffers, optimizer and schedule. Making it is collective."""

    def __init__(
        self,
        pieces: Sequence[GPTModel],
        policy: TrainingOptions,
        stored: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None = None,
        *,
        distributed: bool,
        mtp: Sequence[Tensor] | None = None,
    ) -> None:
        """
        Args:
            pieces: This rank's, whose weights are there.
            policy: Optimizer, schedule, clipping, precision.
            stored: Gives each parameter with what was rounded to it, for masters. Asked when they are first needed, and
                not where saved ones take their place.
            distributed: Divide masters and moments over data-parallel ranks.
            mtp: Parameters of MTP layers here, whose gradients have a norm of their own and are clipped by it;
                ``None`` on all ranks: there are no such layers, or they are clipped with the others.
        """
        self.steps = 0
        """Optimizer steps so far, skipped ones included: the position in the schedule."""
        self.updates = 0
        """Steps that changed the weights."""
        self.rate_scale = 1.0
        """Multiplies the learning rate of the schedule."""
        self.distributed = distributed
        """Masters and moments are divided over data-parallel ranks."""
        self._policy, self._stored = policy, stored
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.pieces = [DistributedDataParallel(piece.config, buffers, piece) for piece in pieces]
        for piece in pieces:
            piece.config.finalize_model_grads_func = _later
        settings = policy.optimizer
        low = policy.precision == "bfloat16"
        self._optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                bf16=low,
                params_dtype=torch.bfloat16 if low else torch.float32,
                use_distributed_optimizer=distributed,
            ),
            self.pieces,
            use_gloo_process_groups=False,
        )
        self._masters = {part: {*part.get_parameters()} for part in self._optimizer.chained_optimizers}
        """The parameters that each of megatron-core's optimizers updates: one has the experts, one all else."""
        self._clips_apart = mtp is not None
        self._mtp = [share.master for found in mtp or () if (share := self.share(found)) is not None]

    def clear_gradients(self) -> None:
        """Forget gradients, e.g. those of a step that failed midway."""
        for piece in self.pieces:
            piece.zero_grad_buffer()
        self._optimizer.zero_grad()

    def add_up(self) -> None:
        """Gradients over data-parallel ranks, copies of shared weights and parts of sequences, divided by nothing.

        Once before each update: what is added up already must not be added up again.
        """
        finalize_model_grads(self.pieces, None)

    def step(self, adam: AdamStep | None, *, trained: bool) -> StepResult:
        """Clip, update, publish masters to weights on all data-parallel ranks. Collective.

        Args:
            adam: In place of the policy's own values and schedule.
            trained: Some rank had a loss with a gradient. Else weights stay as they are: no decay, no momentum.
        """
        self.refine()
        self.steps += 1
        policy, optimizer = self._policy, self._optimizer
        scheduled = policy.optimizer.lr * schedule_factor(policy.schedule, self.steps)
        usual = AdamStep(
            scheduled, policy.optimizer.betas, policy.optimizer.eps, policy.optimizer.weight_decay, policy.max_grad_norm
        )
        used = adam or usual
        lr = used.lr * self.rate_scale
        optimizer.prepare_grads()
        is_apart = {id(master) for master in self._mtp}
        others = [master for master in chain(*self._masters.values()) if id(master) not in is_apart]
        norm = self._norm_without(self._mtp)
        mtp_norm = self._norm_without(others) if self._clips_apart else 0.0
        finite = math.isfinite(norm) and math.isfinite(mtp_norm)
        if finite and trained:
            for masters, length in ((others, norm), (self._mtp, mtp_norm)):
                if used.max_grad_norm is not None and length > used.max_grad_norm:
                    clip_grad_by_total_norm_fp32(masters, used.max_grad_norm, length)
            for group in optimizer.param_groups:
                group["lr"], group["betas"], group["eps"] = lr, used.betas, used.eps
                group["weight_decay"] = used.weight_decay * group["wd_mult"]
            optimizer.step_with_ready_grads()
            self.updates += 1
        self.clear_gradients()
        further = {"mtp_grad_norm": Mean(mtp_norm)} if self._clips_apart else {}
        return StepResult(norm, lr, skipped=not finite, metrics=further)

    def _norm_without(self, others: Sequence[Tensor]) -> float:
        """Of the gradients of all ranks but those of these masters. Collective."""
        gradients = [master.grad for master in others]
        for master in others:
            master.grad = None
        norm = float(self._optimizer.get_grad_norm())
        for master, gradient in zip(others, gradients, strict=True):
            master.grad = gradient
        return norm

    @torch.no_grad()
    def refine(self) -> None:
        """Give masters, once, what the rounding of the weights left out. They stay as they are where what is stored is
        not what the weights are the rounding of."""
        stored, self._stored = self._stored, None
        if stored is None or self._policy.precision == "float32":
            return
        for parameter, values in stored():
            share = self.share(parameter) if parameter.requires_grad else None
            if share is not None and parameter.dtype not in (values.dtype, torch.float32):
                mine = slice(share.start, share.start + share.master.numel())
                exact = values.reshape(-1)[mine].to(share.master)
                if torch.equal(exact.to(parameter.dtype), parameter.reshape(-1)[mine]):
                    share.master.copy_(exact.view_as(share.master))

    def loaded(self, steps: int, updates: int, rate_scale: float) -> None:
        """Take the position of a saved state, whose masters are there."""
        self.steps, self.updates, self.rate_scale, self._stored = steps, updates, rate_scale, None

    def gradients(self) -> Iterator[Tensor]:
        """The buffers that all gradients are views of."""
        for piece in self.pieces:
            for buffer in (*piece.buffers, *piece.expert_parallel_buffers):
                yield buffer.grad_data

    def tensors(self) -> dict[str, Tensor]:
        """Masters that have memory of their own, and all moments, numbered."""
        weights = {
            parameter.untyped_storage().data_ptr() for piece in self.pieces for parameter in piece.module.parameters()
        }
        held: list[Tensor] = []
        for part in self._optimizer.chained_optimizers:
            masters = [master.detach() for group in part.optimizer.param_groups for master in group["params"]]
            held += [master for master in masters if master.untyped_storage().data_ptr() not in weights]
            held += [value for state in part.optimizer.state.values() for value in state.values() if _is_tensor(value)]
        return {str(number): tensor for number, tensor in enumerate(held)}

    def share(self, parameter: Tensor) -> Share | None:
        """The share of ``parameter`` that this rank updates, if any."""
        for part in self._optimizer.chained_optimizers:
            inner = part.optimizer
            if not self.distributed:
                master = parameter if parameter.dtype == torch.float32 else parameter.main_param  # type: ignore[attr-defined]
                if master in self._masters[part]:
                    return Share(0, master, inner)
            elif parameter in part.model_param_group_index_map:
                group, place = part.model_param_group_index_map[parameter]
                start = part._get_model_param_range_map(parameter)["param"].start
                return Share(start, inner.param_groups[group]["params"][place], inner)
        return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _later(*_args: Any, **_kwargs: Any) -> None:
    """Gradients of several passes add up on each rank first (``Learner.add_up``)."""
