"""Routers of mixtures that count their tokens, keep their load even, and have a bias that moves with it.

# S = tokens of a row here, R = rows, T = S * R, E = experts, B = sequences of a microbatch, P = tokens of these here

What is counted and balanced are tokens of sequences (``nemorl_tensors.engines.routers``). Which stand where a layer's
call is told by ``visits`` [2, P]: the place of each in [S, R], and its sequence. It travels as the argument that
megatron-core calls a padding mask, so that a layer that is recomputed is told of the microbatch that it was given.
megatron-core's own auxiliary losses and biases are left off: those are of microbatches, these are moved before it is
known whether there will be an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from nemorl.errors import BackendError
from nemorl.metrics import Mean, Metrics
from nemorl_rl.models.routers import changed, load_metrics
from nemorl_tensors.engines.routers import balance_loss, moved_bias, sequence_loads
from nemorl_tensors.engines.rows import Rows
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from nemorl_rl.models.routers import RouterConfig

    from nemorl_megatron.parallel import Parallel


class Router(TopKRouter):  # type: ignore[misc]
    """A router that is told which of its tokens are whose."""

    def __init__(self, *args: Any, has_bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        if has_bias:
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=device))
        self.visits: Tensor | None = None
        """Of the pass that is under way; ``None``: nothing is counted."""
        self.sequences, self.loss_scale = 0, 0.0
        """Most sequences of a microbatch; what the sum over tokens of this layer's auxiliary loss is times."""
        self.loads = torch.zeros(self.num_experts, dtype=torch.float64, device=device)
        """[E] tokens here since the last update"""
        self.imbalance = torch.zeros((), dtype=torch.float64, device=device)
        """Sum over tokens of the auxiliary loss since the last update"""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores and choice of megatron-core, with the gradient of the auxiliary loss behind the scores."""
        probs, chosen_TE = super().routing(logits)
        # A layer that will be recomputed runs without gradient in training mode, once before it counts.
        if self.visits is None or (self.training and not torch.is_grad_enabled()):
            return probs, chosen_TE
        places, owners = self._here(self.visits, len(chosen_TE))
        with torch.no_grad():
            loads_BE = sequence_loads(chosen_TE, places, owners, self.sequences)
            self.loads += loads_BE.sum(0)
        if self.loss_scale and self.training:
            if self.tp_cp_group.size() > 1:
                dist.all_reduce(loads_BE, group=self.tp_cp_group)
            total = balance_loss(self._scores(logits.view(-1, self.num_experts)), loads_BE, places, owners)
            self.imbalance += total.detach()
            probs = MoEAuxLossAutoScaler.apply(probs, total * self.loss_scale)
        return probs, chosen_TE

    def _here(self, visits: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Those among the tokens of this tensor-parallel rank, which has a part of each row."""
        places, owners = visits
        if not self.config.sequence_parallel:
            return places, owners
        places = places - self.tp_group.rank() * tokens
        is_here = (places >= 0) & (places < tokens)
        return places[is_here], owners[is_here]

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """[T, E] as experts are chosen by, before any bias."""
        if self.score_function == "sigmoid":
            return torch.sigmoid(logits_TE.float())
        return torch.softmax(logits_TE, dim=-1, dtype=torch.float32)


class MixtureLayer(TransformerLayer):  # type: ignore[misc]
    """A layer with a mixture, whose router it tells whose tokens it is given."""

    def _forward_mlp(
        self, hidden_states: Tensor, inference_context: Any = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        self.mlp.router.visits = padding_mask
        found: Tensor = super()._forward_mlp(hidden_states, inference_context)
        self.mlp.router.visits = None
        return found


def visits(rows: Rows) -> Tensor:
    """[2, P] the places of tokens in [S, R], and their sequences, of rows [R, S]."""
    height, width = rows.input_ids.shape
    columns, above = rows.places % max(1, width), rows.places // max(1, width)
    return torch.stack((columns * height + above, rows.owners))


class Routers:
    """The routers of this rank's layers, and what they have counted since the last update."""

    def __init__(self, pieces: Sequence[GPTModel], parallel: Parallel, config: RouterConfig) -> None:
        """
        Args:
            pieces: This rank's.
            parallel: Its place.
            config: How they are trained.
        """
        self._config, self._parallel = config, parallel
        self._found = [part for piece in pieces for part in piece.modules() if isinstance(part, Router)]
        self.exist = bool(parallel.largest(len(self._found)))
        """On any rank."""
        self._tokens = 0.0
        self._require(pieces)

    def _require(self, pieces: Sequence[GPTModel]) -> None:
        wanted = sorted({"balance_loss", "bias_update_rate"} & {*changed(self._config)})
        if not wanted:
            return
        if not self.exist:
            are_others = any(isinstance(part, TopKRouter) for piece in pieces for part in piece.modules())
            raise BackendError(
                f"router.{wanted[0]} is for routers that this backend built: "
                + ("those of this model are Megatron-Bridge's" if are_others else "this model has none"),
                fix=f"remove router.{' and router.'.join(wanted)}",
            )
        if self._config.bias_update_rate and any(router.expert_bias is None for router in self._found):
            raise BackendError(
                "router.bias_update_rate moves a bias for the choice of experts, and this architecture has none",
                fix="set it to 0; router.balance_loss evens the load of any mixture",
            )

    @property
    def are_balanced(self) -> bool:
        """All sequences have a gradient: that of the auxiliary loss."""
        return self.exist and self._config.balance_loss > 0

    def begin(self, tokens: int, sequences: int) -> None:
        """Before the passes of a batch. Collective.

        Args:
            tokens: That the model is fed of this rank's shard.
            sequences: Of the shard.
        """
        if not self.exist:
            return
        # The ranks of a copy of the model have the same shard.
        copies = self._parallel.world_size // self._parallel.data_parallel_size
        total = self._parallel.sum(tokens) / copies
        self._tokens += total
        for router in self._found:
            router.sequences = sequences
            router.loss_scale = self._config.balance_loss / max(total, 1)

    def clear(self) -> None:
        """Forget what was counted."""
        self._tokens = 0.0
        for router in self._found:
            router.loads.zero_()
            router.imbalance.zero_()

    @torch.no_grad()
    def updated(self, *, moves: bool) -> Metrics:
        """After an update: biases move if it changed weights; the metrics of all layers. Collective."""
        if not self.exist:
            return {}
        layers = int(self._parallel.largest(max((router.layer_number for router in self._found), default=0)))
        experts = int(self._parallel.largest(max((router.num_experts for router in self._found), default=0)))
        found = torch.zeros((layers, experts + 1), dtype=torch.float64, device=self._parallel.device)
        for router in self._found:
            found[router.layer_number - 1, :experts] = router.loads
            found[router.layer_number - 1, experts] = router.imbalance
        # Stages have other layers; ranks of one stage have other tokens of the same.
        dist.all_reduce(found)
        counts_LE, imbalance_L = found[:, :experts], found[:, experts]
        for router in self._found if moves and self._config.bias_update_rate else ():
            loads_E = counts_LE[router.layer_number - 1]
            router.expert_bias.copy_(moved_bias(router.expert_bias, loads_E, self._config.bias_update_rate))
        balanced = {}
        if self.are_balanced and self._tokens:
            used = int((counts_LE.sum(1) > 0).sum())
            balanced = {"balance_loss": Mean(float(imbalance_L.sum()) / self._tokens / max(used, 1))}
        self.clear()
        return {**load_metrics(counts_LE.tolist()), **balanced}
