"""Routers of mixtures that count their tokens, keep their load even by a loss or a bias, and take recorded choices.

# S = tokens of a row here, R = rows, T = S * R, E = experts, B = sequences of a microbatch, P = tokens of these here
# L = layers with experts on this rank, K = experts of each token

What is counted and balanced are tokens of sequences (``nemorl_tensors.engines.routers``). Which stand where a layer's
call is told by ``visits`` [2 + L * K, P] int32: the place of each in [S, R], its sequence, and where choices are
replayed (arXiv:2510.11370) its experts, layer by layer, ``NO_ROUTE`` where none are known. It travels as the argument
that megatron-core calls a padding mask, so that a layer that is recomputed is told of the microbatch that it was given.
megatron-core's own auxiliary losses, biases and replay are left off: losses are of microbatches, biases are moved
before it is known whether there will be an update, and replay keeps its choices in the order of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from nemorl.errors import BackendError
from nemorl.metrics import Mean, Metrics
from nemorl_rl.models.routers import changed, load_metrics
from nemorl_tensors.batch import NO_ROUTE
from nemorl_tensors.engines.routers import (
    balance_loss,
    moved_bias,
    replayed_choice,
    require_routes_of,
    sequence_loads,
)
from nemorl_tensors.engines.rows import Rows
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from nemorl_rl.models.routers import RouterConfig

    from nemorl_megatron.parallel import Parallel


UNROUTED = 2
"""Rows of ``visits`` above those of experts."""


class RecordedChoice:
    """Stands where megatron-core has its ``RouterReplay``, which is asked for the experts of a router's tokens."""

    def __init__(self) -> None:
        self.experts_TK: Tensor | None = None
        """Of the pass that is under way; ``None``: the router chooses all."""
        self.flips: Tensor | None = None
        """[2] of ``replayed_choice``, of the last pass"""

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """[T, K] scores, with the gradient of the router, and experts."""
        values, own = choose(scores_TE, topk, num_groups, group_topk)
        if self.experts_TK is None:
            return values, own
        chosen, self.flips = replayed_choice(self.experts_TK, own)
        return scores_TE.gather(1, chosen), chosen


class Router(TopKRouter):  # type: ignore[misc]
    """A router that is told which of its tokens are whose, and where they were sent."""

    def __init__(self, *args: Any, has_bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        if has_bias:
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=device))
        self.visits: Tensor | None = None
        """Of the pass that is under way; ``None``: nothing is counted or replayed."""
        self.counts = False
        """Of passes that tell their visits."""
        self.order = 0
        """Among the routers of this rank."""
        self.router_replay = RecordedChoice()
        self.sequences, self.loss_scale = 0, 0.0
        """Most sequences of a microbatch; what the sum over tokens of this layer's auxiliary loss is times."""
        self.loads = torch.zeros(self.num_experts, dtype=torch.float64, device=device)
        """[E] tokens here since the last update"""
        self.imbalance = torch.zeros((), dtype=torch.float64, device=device)
        """Sum over tokens of the auxiliary loss since the last update"""
        self.flips = torch.zeros(2, dtype=torch.float64, device=device)
        """[2] of ``replayed_choice`` since the last update"""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores and choice of megatron-core, with the gradient of the auxiliary loss behind the scores."""
        visits = None if self.visits is None else self._here(self.visits.long(), logits.shape[:2].numel())
        replay = self.router_replay
        replay.experts_TK = None if visits is None else self._recorded(visits, logits.shape[:2].numel())
        probs, chosen_TE = super().routing(logits)
        # A layer that will be recomputed runs without gradient in training mode, once before it counts.
        if visits is None or not self.counts or (self.training and not torch.is_grad_enabled()):
            return probs, chosen_TE
        places, owners = visits[:UNROUTED]
        with torch.no_grad():
            loads_BE = sequence_loads(chosen_TE, places, owners, self.sequences)
            self.loads += loads_BE.sum(0)
            if replay.experts_TK is not None and replay.flips is not None:
                self.flips += replay.flips
        if self.loss_scale and self.training:
            if self.tp_cp_group.size() > 1:
                dist.all_reduce(loads_BE, group=self.tp_cp_group)
            total = balance_loss(self._scores(logits.view(-1, self.num_experts)), loads_BE, places, owners)
            self.imbalance += total.detach()
            probs = MoEAuxLossAutoScaler.apply(probs, total * self.loss_scale)
        return probs, chosen_TE

    def _here(self, visits: Tensor, tokens: int) -> Tensor:
        """Those among the tokens of this tensor-parallel rank, which has a part of each row."""
        if not self.config.sequence_parallel:
            return visits
        places = visits[0] - self.tp_group.rank() * tokens
        is_here = (places >= 0) & (places < tokens)
        return torch.cat((places[None], visits[1:]))[:, is_here]

    def _recorded(self, visits: Tensor, tokens: int) -> Tensor | None:
        """[T, K] experts of this layer's tokens, where visits tell them."""
        if len(visits) == UNROUTED:
            return None
        first = UNROUTED + self.order * self.topk
        experts_TK = visits.new_full((tokens, self.topk), NO_ROUTE)
        experts_TK[visits[0]] = visits[first : first + self.topk].t()
        return experts_TK

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


class Routers:
    """The routers of this rank's layers: what they are told, and what they have counted since the last update."""

    def __init__(self, pieces: Sequence[GPTModel], parallel: Parallel, config: RouterConfig, *, replays: bool) -> None:
        """
        Args:
            pieces: This rank's.
            parallel: Its place.
            config: How they are trained.
            replays: Tokens go to the experts that a batch's routes name.
        """
        self._config, self._parallel, self.replays = config, parallel, replays
        self._found = [part for piece in pieces for part in piece.modules() if isinstance(part, Router)]
        self.exist = bool(parallel.largest(len(self._found)))
        """On any rank."""
        self._tokens, self._is_counting = 0.0, False
        self._require(pieces)
        model = pieces[0].config
        self._mixtures = [layer for layer, sparse in enumerate(model.moe_layer_freq) if sparse] if self.exist else []
        """Layers with experts, of all stages"""
        self._chosen = model.moe_router_topk
        for order, router in enumerate(self._found):
            router.order = order

    def _require(self, pieces: Sequence[GPTModel]) -> None:
        replayed = {"replay"} if self.replays else set()
        wanted = sorted(({"balance_loss", "bias_update_rate"} & {*changed(self._config)}) | replayed)
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

    def visits(self, rows: Rows) -> Tensor | None:
        """What the routers of this rank are told of a pass, if anything.

        Args:
            rows: [R, S]

        Raises:
            BackendError: Their routes are of another model.
        """
        routes = rows.routes if self.replays else None
        if routes is None and not (self.exist and self._is_counting):
            return None
        height, width = rows.input_ids.shape
        columns, above = rows.places % max(1, width), rows.places // max(1, width)
        told = torch.stack((columns * height + above, rows.owners)).int()
        if routes is None:
            return told
        require_routes_of(routes, len(self._mixtures), self._chosen)
        own = [self._mixtures.index(router.layer_number - 1) for router in self._found]
        return torch.cat((told, routes[rows.places][:, own].flatten(1).t().int()))

    @contextmanager
    def counting(self, tokens: int, sequences: int) -> Iterator[None]:
        """Within it, the passes of a batch count. Collective.

        Args:
            tokens: That the model is fed of this rank's shard.
            sequences: Of the shard.
        """
        if not self.exist:
            yield
            return
        # The ranks of a copy of the model have the same shard.
        copies = self._parallel.world_size // self._parallel.data_parallel_size
        total = self._parallel.sum(tokens) / copies
        self._tokens += total
        for router in self._found:
            router.sequences = sequences
            router.loss_scale = self._config.balance_loss / max(total, 1)
        self._count(True)
        try:
            yield
        finally:
            self._count(False)

    def _count(self, on: bool) -> None:
        self._is_counting = on
        for router in self._found:
            router.counts = on

    def clear(self) -> None:
        """Forget what was counted."""
        self._tokens = 0.0
        for router in self._found:
            router.loads.zero_()
            router.imbalance.zero_()
            router.flips.zero_()

    @torch.no_grad()
    def updated(self, *, moves: bool) -> Metrics:
        """After an update: biases move if it changed weights; the metrics of all layers. Collective."""
        if not self.exist:
            return {}
        layers = int(self._parallel.largest(max((router.layer_number for router in self._found), default=0)))
        experts = int(self._parallel.largest(max((router.num_experts for router in self._found), default=0)))
        found = torch.zeros((layers, experts + 3), dtype=torch.float64, device=self._parallel.device)
        for router in self._found:
            counted = (router.loads, router.imbalance[None], router.flips)
            found[router.layer_number - 1] = torch.cat(counted)
        # Stages have other layers; ranks of one stage have other tokens of the same.
        dist.all_reduce(found)
        counts_LE, imbalance_L, flips = found[:, :experts], found[:, experts], found[:, experts + 1 :].sum(0)
        for router in self._found if moves and self._config.bias_update_rate else ():
            loads_E = counts_LE[router.layer_number - 1]
            router.expert_bias.copy_(moved_bias(router.expert_bias, loads_E, self._config.bias_update_rate))
        balanced: Metrics = {}
        if self.are_balanced and self._tokens:
            used = int((counts_LE.sum(1) > 0).sum())
            balanced = {"balance_loss": Mean(float(imbalance_L.sum()) / self._tokens / max(used, 1))}
        replayed: Metrics = {"routes_flipped": Mean(*map(float, flips.tolist()))} if self.replays else {}
        self.clear()
        return {**load_metrics(counts_LE.tolist()), **balanced, **replayed}
