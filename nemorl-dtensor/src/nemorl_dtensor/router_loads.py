"""Routers of a mixture: in which precision they score, how many tokens experts get, and what keeps that even.

# T = tokens of the rows, E = experts, K = experts of each token, P = tokens of sequences (``Rows.places``), L = layers

The auxiliary loss and the counts are those of ``nemorl_tensors.engines.routers``: of sequences, whatever the layout.
Of a pass that is counted, the backend says which token of its rows is whose (:meth:`RouterLoads.see`). The gradient of
the auxiliary loss joins at the weights of a token's experts: so it is in the same backward pass, also where FSDP2 frees
weights between, and layers are recomputed. A recomputed layer counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from nemorl.errors import BackendError
from nemorl.metrics import Mean, Metrics
from nemorl_rl.models.routers import changed, load_metrics
from nemorl_tensors.engines.routers import balance_loss, moved_bias, sequence_loads
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nemorl_dtensor.experts import is_stack
from nemorl_dtensor.mixtures import SCORES
from nemorl_dtensor.ranks import computing_device
from nemorl_dtensor.recomputation import KeptChoices, is_second_pass

if TYPE_CHECKING:
    from nemorl_rl.models.routers import RouterConfig
    from nemorl_tensors.engines.rows import Rows
    from transformers import PreTrainedModel

BIAS = "e_score_correction_bias"
"""transformers' name of the buffer that is added to scores when experts are chosen."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class RouterLoads:
    """The routers of a model, in the order of layers; none in a model whose routers are not known."""

    def __init__(self, model: PreTrainedModel, config: RouterConfig, context: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            model: Its routers get another forward pass. Not wrapped by FSDP2 yet.
            config: How they are trained.
            context: The ranks that share the tokens of sequences with this one; ``None``: it has whole sequences.

        Raises:
            BackendError: An option is set that the model's routers do not have.
        """
        kind = model.config.get_text_config().model_type
        self._config, self._context = config, context
        self._routers = _routers(model) if kind in SCORES else []
        for name in () if self._routers else changed(config):
            raise BackendError(
                f"routers of {type(model).__name__} are trained by the gradient of the loss alone: router.{name} is "
                f"for models of type {', '.join(sorted(SCORES))}",
                fix=f"remove policy.backend.router.{name}",
            )
        if config.bias_update_rate and not self.biases:
            raise BackendError(
                f"{type(model).__name__} has no bias for the choice of experts",
                fix="set policy.backend.router.bias_update_rate: 0; router.balance_loss evens the load of any mixture",
            )
        self._scored: Callable[[Tensor], Tensor] = SCORES_OF[SCORES.get(kind, "softmax")]
        self._rows: Rows | None = None
        self._sequences, self._is_counting, self._loss_scale, self._tokens = 0, False, 0.0, 0.0
        self._loads: dict[int, Tensor] = {}
        """By layer of experts, [E] float64 tokens here since the last update"""
        self._imbalance: dict[int, Tensor] = {}
        """Likewise the sum over tokens of the auxiliary loss"""
        for layer, router in enumerate(self._routers):
            router.forward = partial(self._route, layer, router.forward)

    @property
    def exist(self) -> bool:
        """The model has routers that are known."""
        return bool(self._routers)

    @property
    def are_balanced(self) -> bool:
        """All sequences have a gradient: that of the auxiliary loss."""
        return self.exist and self._config.balance_loss > 0

    @property
    def biases(self) -> list[Tensor]:
        """[E] float32 each, of the routers that have one."""
        return [bias for router in self._routers for bias in router_biases(router).values()]

    @contextmanager
    def counting(self, tokens: int) -> Iterator[None]:
        """Within it, passes whose rows are seen count. Collective.

        Args:
            tokens: That the model is fed of this rank's shard, which ranks that share sequences have in common.
        """
        if not self._routers:
            yield
            return
        copies = 1 if self._context is None else self._context.size()
        total = float(_summed(torch.tensor(float(tokens), dtype=torch.float64, device=self._device))) / copies
        self._tokens += total
        self._loss_scale = self._config.balance_loss / max(total, 1.0)
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting, self._rows = False, None

    def see(self, rows: Rows | None, sequences: int = 0) -> None:
        """Of which rows the next pass is, and its repetition: ``None``, or any outside of ``counting``, counts nothing.

        Args:
            rows: This rank's part of its rows.
            sequences: Of its microbatch.
        """
        self._rows, self._sequences = rows if self._is_counting else None, sequences

    def clear(self) -> None:
        """Forget what was counted."""
        self._tokens = 0.0
        self._loads, self._imbalance = {}, {}

    @torch.no_grad()
    def updated(self, *, moves: bool) -> Metrics:
        """After an update: biases move if it changed weights; the metrics of all layers. Collective."""
        if not self._routers:
            return {}
        counts_LE = _summed(torch.stack([self._loads.get(layer, self._zero) for layer in range(len(self._routers))]))
        imbalance = _summed(torch.stack([self._zero[0], *self._imbalance.values()]).sum())
        if moves and self._config.bias_update_rate:
            for bias_E, counts_E in zip(self.biases, counts_LE, strict=True):
                bias_E.copy_(moved_bias(bias_E, counts_E.to(bias_E.device), self._config.bias_update_rate))
        balanced: Metrics = {}
        if self.are_balanced and self._tokens:
            balanced = {"balance_loss": Mean(float(imbalance) / self._tokens / len(self._routers))}
        self.clear()
        return {**load_metrics(counts_LE.tolist()), **balanced}

    @property
    def _device(self) -> torch.device:
        return computing_device(next(self._routers[0].parameters()))

    @property
    def _zero(self) -> Tensor:
        """[E] of a layer that had no pass."""
        experts = next(self._routers[0].parameters()).shape[0]
        return torch.zeros(experts, dtype=torch.float64, device=self._device)

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with KeptChoices(), _Precision(DTYPES.get(self._config.dtype)):
            logits_TE, weights_TK, chosen_TK = forward(*args, **kwargs)
        rows = self._rows
        if rows is None:
            return logits_TE, weights_TK, chosen_TK
        with torch.no_grad():
            chosen_TE = torch.zeros(logits_TE.shape, dtype=torch.bool, device=logits_TE.device)
            chosen_TE.scatter_(1, chosen_TK, value=True)
            loads_BE = sequence_loads(chosen_TE, rows.places, rows.owners, self._sequences)
            if not is_second_pass():
                self._loads[layer] = self._loads.get(layer, 0) + loads_BE.sum(0)
        if self.are_balanced and torch.is_grad_enabled():
            if self._context is not None:
                dist.all_reduce(loads_BE, group=self._context)
            total = balance_loss(self._scored(logits_TE), loads_BE, rows.places, rows.owners)
            if not is_second_pass():
                self._imbalance[layer] = self._imbalance.get(layer, 0) + total.detach().double()
            weights_TK = _WithLoss.apply(weights_TK, total * self._loss_scale)  # type: ignore[no-untyped-call]
        return logits_TE, weights_TK, chosen_TK


def router_biases(module: nn.Module) -> dict[str, Tensor]:
    """The biases that choose experts within a module, by name."""
    return {name: buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] == BIAS}


def _softmax(logits_TE: Tensor) -> Tensor:
    return torch.softmax(logits_TE, dim=-1, dtype=torch.promote_types(torch.float32, logits_TE.dtype))


def _sigmoid(logits_TE: Tensor) -> Tensor:
    return torch.sigmoid(logits_TE.to(torch.promote_types(torch.float32, logits_TE.dtype)))


SCORES_OF: dict[str, Callable[[Tensor], Tensor]] = {"softmax": _softmax, "sigmoid": _sigmoid}
"""[T, E] logits -> what experts are chosen by, before any bias"""


def _routers(model: nn.Module) -> list[Any]:
    """The module beside each stack of experts that chooses among them."""
    found: list[Any] = []
    for module in model.modules():
        children = dict(module.named_children())
        if any(is_stack(child) for child in children.values()):
            found += [children[name] for name in ("gate", "router") if name in children]
    return found


def _summed(values: Tensor) -> Tensor:
    """Over all ranks: mixtures have other tokens on each."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class _Precision(TorchFunctionMode):
    """Within it linear products are computed in another precision, of both factors and the offset."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and self._dtype is not None:
            args = tuple(each.to(self._dtype) if isinstance(each, Tensor) else each for each in args)
        return func(*args, **(kwargs or {}))


class _WithLoss(torch.autograd.Function):
    """Weights as they are, whose gradient comes together with that of a loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)
