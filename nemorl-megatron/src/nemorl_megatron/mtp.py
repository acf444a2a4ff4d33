"""Multi-token prediction (MTP): layers after the model's own, each of which predicts one token further ahead.

# S = tokens of a row, R = rows, H = hidden size, M = scored tokens, D = depths

DeepSeek-V3 (arXiv:2412.19437, section 2.2). At depth k, of the state of token i at depth k - 1 and the embedding of
token i + k (eq. 21, 22)

    h_i^k = TRM_k(M_k [RMSNorm(h_i^{k-1}); RMSNorm(Emb(t_{i+k}))])

and the model's output head predicts token i + k + 1 of it (eq. 23). The states of depth 0 are the model's, after its
last norm; those of a later depth go on without the norm before the head, as engines draft with them.

Modules and their names are megatron-core's. Its loss is not used: that is of every token of the logits, within the
model's forward pass. Here it is of the trained tokens, by the output head of ``head``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from nemorl.metrics import Mean, Metrics
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import Rows
from torch import Tensor

from nemorl_megatron.layers import Norm, layer_spec

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemorl_megatron.config import AttentionName
    from nemorl_megatron.head import OutputHead
    from nemorl_megatron.mtp_config import MtpConfig
    from nemorl_megatron.parallel import Parallel
    from nemorl_megatron.settings import Settings


class MtpLayer(MultiTokenPredictionLayer):  # type: ignore[misc]
    """One depth: a projection of state and embedding, and a transformer layer."""

    def forward(self, states: Tensor, embedded: Tensor, given: Mapping[str, Any]) -> Tensor:
        """States of this depth, before the norm of the head.

        Args:
            states: [S, R, H] of the depth before; [S / tensor, R, H] with sequence parallelism.
            embedded: The same of the tokens.
            given: What the transformer layer is told of the rows.
        """
        computed = partial(self._computed, given)
        if self.config.recompute_granularity == "full" and self.training and torch.is_grad_enabled():
            return tensor_parallel.checkpoint(computed, False, states, embedded)  # type: ignore[no-any-return]
        return computed(states, embedded)

    def _computed(self, given: Mapping[str, Any], states: Tensor, embedded: Tensor) -> Tensor:
        joined = self._concat_embeddings(states, embedded)
        found: Tensor = self.transformer_layer(joined, attention_mask=None, **given)[0]
        return found


def mtp_block_spec(
    settings: Settings, attention: AttentionName, config: TransformerConfig
) -> MultiTokenPredictionBlockSubmodules:
    """The MTP layers of the last pipeline stage."""
    layers = range(settings.layers, settings.layers + settings.mtp_layers)
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=MtpLayer,
                submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=Norm,
                    hnorm=Norm,
                    eh_proj=ColumnParallelLinear,
                    transformer_layer=layer_spec(settings, layer, attention, config),
                    layer_norm=Norm,
                ),
            )
            for layer in layers
        ]
    )


@dataclass(frozen=True)
class Ahead:
    """How MTP layers predict in a training pass over a microbatch, and what is made of it."""

    config: MtpConfig
    rows: tuple[Rows, ...]
    """[D] this rank's part of them, as :func:`shifted` gives them for each depth"""

    @classmethod
    def of(cls, config: MtpConfig, rows: Rows, part: Callable[[Rows], Rows]) -> Ahead:
        """That of whole rows, of which this rank has a part."""
        depths = range(1, config.num_layers + 1)
        return cls(config, tuple(part(shifted(rows, depth)) for depth in depths))

    def to(self, device: torch.device | str) -> Ahead:
        """This one on another device."""
        return replace(self, rows=tuple(rows.to(device) for rows in self.rows))

    def states(self, model: GPTModel, states: Tensor, given: Mapping[str, Any], visits: Tensor | None) -> list[Tensor]:
        """[S, R, H] of each depth, after the norm of the head, of the last stage.

        Args:
            model: The last stage.
            states: Of the model, after its last norm.
            given: What layers are told of the rows.
            visits: That of ``routers``.
        """
        config = self.config
        if config.is_apart:
            # A leaf of its own: recomputed layers ask that some input has a gradient.
            states = states.detach().requires_grad_(config.trains and torch.is_grad_enabled())
        given = {**given, "padding_mask": visits if config.trains else None}
        found: list[Tensor] = []
        with torch.set_grad_enabled(config.trains and torch.is_grad_enabled()):
            for depth, rows in enumerate(self.rows):
                embedded = model.embedding(input_ids=rows.input_ids, position_ids=None)
                layer = model.mtp.layers[depth % config.stored_layers]
                states = layer(states, embedded.detach() if config.is_apart else embedded, given)
                found.append(layer.final_layernorm(states))
        return found

    def loss(
        self, head: OutputHead, states: Tensor, batch: TokenBatch, logprobs: Tensor | None, parallel: Parallel
    ) -> tuple[Tensor, Metrics]:
        """What is added to the loss of a microbatch, and its metrics. Collective where sequences are divided.

            factor / D * sum_k sum_t w_t * -log P_t^k[token t]            (eq. 24, 25)

        Differs from the paper: the mean is over trained tokens, weighed as the policy's loss weighs them, and
        probabilities are those of ``softmax(logits / temperature)``, from which the sampler draws.

        Args:
            head: Of the model.
            states: [(1 + D) S, R, H] as the last stage gives them; of this rank's part of the rows.
            batch: The microbatch.
            logprobs: [N] of the policy, where the loss is given those.
            parallel: This rank's place.

        Returns:
            The part of this rank's tokens; metrics of all of the microbatch.
        """
        config = self.config
        # Zero, and yet it leads back to all layers: every rank takes part in every backward pass.
        value = (states.sum() * 0.0 if config.trains else states.new_zeros(())).float()
        totals = torch.zeros(3, dtype=torch.float64, device=states.device)  # nats, accepted, tokens
        with torch.set_grad_enabled(config.trains and torch.is_grad_enabled()):
            for rows, of_depth in zip(self.rows, states.chunk(1 + len(self.rows))[1:], strict=True):
                targets = rows.targets
                if not targets.numel():
                    continue
                width = rows.input_ids.shape[1]
                found = of_depth[rows.predictors % width, rows.predictors // width]
                scores = head.score(found, batch.token_ids[targets], batch.temperature, detached=config.is_apart)
                value = value - (scores * batch.loss_weights[targets]).sum()
                trained, known = batch.mask[targets], scores.detach()
                totals[0] -= known[trained].double().sum()
                totals[2] += trained.sum()
                if logprobs is not None:
                    shares = (known - logprobs.detach()[targets]).exp().clamp(max=1.0)
                    totals[1] += shares[trained].double().sum()
        if parallel.sizes.context > 1:
            dist.all_reduce(totals, group=parallel.context_group)
        nats, accepted, tokens = totals.tolist()
        metrics = {"mtp_loss": Mean(nats, tokens)}
        if logprobs is not None:
            metrics["mtp_acceptance"] = Mean(accepted, tokens)
        return value * (config.loss_scaling_factor / config.num_layers), metrics


def shifted(rows: Rows, depth: int) -> Rows:
    """Rows as a depth sees them: in place of each token the one ``depth`` further on; and the scored tokens that have
    so many before the one that predicts them, predicted by the state that much earlier.

    In place of the last tokens of a sequence stand those of another, or the row's first. Their states predict nothing
    that is scored, and no other token of the sequence attends to them.
    """
    columns = rows.predictors % max(1, rows.input_ids.shape[1])
    places = columns if rows.position_ids is None else rows.position_ids.flatten()[rows.predictors]
    reach = places >= depth
    return replace(
        rows,
        input_ids=rows.input_ids.roll(-depth, dims=1),
        predictors=rows.predictors[reach] - depth,
        targets=rows.targets[reach],
        target_ids=rows.target_ids[reach],
    )


def mtp_parameters(pieces: Sequence[GPTModel]) -> list[torch.nn.Parameter]:
    """Of the MTP layers on this rank."""
    return [found for piece in pieces if piece.mtp_process for found in piece.mtp.parameters()]
