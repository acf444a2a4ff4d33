"""The training backend ``megatron``: one rank of a policy that learns over megatron-core.

# N = tokens of all sequences concatenated, M = scored tokens, K = candidates of each

A pass is: plan microbatches and run them through megatron-core's schedule (``pipeline``), where the last stage turns
hidden states into log-probs (``head``) and those into the loss. A step is passes, then one update (``optim``). Losses
are sums over tokens with weights that were normalised on the driver, so microbatches and ranks simply add up. The ranks
of one copy of the model are given the same shard of the data, and what the last stage finds all of them return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts import AdamStep, Head, Loss, WeightsName
from nemorl.metrics import Metrics
from nemorl_rl.planning.work import Model, MtpWork, WorkMeter
from nemorl_tensors import TokenBatch, vocab_parallel_topk_logprobs
from nemorl_tensors.engines.checkpoint_files import RankFiles
from nemorl_tensors.engines.context_rows import added_up
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.no_gradient import evaluate_without_gradient, gradient_metrics, split_by_gradient
from nemorl_tensors.engines.observing import Activations, Recorder
from nemorl_tensors.engines.pieces import Piece
from nemorl_tensors.engines.rank_backend import RankBackend
from nemorl_tensors.engines.residency import Residency
from nemorl_tensors.engines.routers import require_routes
from nemorl_tensors.engines.rows import fed_lengths
from nemorl_tensors.engines.steps import (
    PLACE,
    Evaluate,
    StepResult,
    bare,
    evaluate_loss,
    output_shape,
    pass_metrics,
    with_places,
)
from torch import Tensor

from nemorl_megatron import checkpoint, export
from nemorl_megatron.bridge import bridge_for
from nemorl_megatron.head import AnyHead, OutputHead, ValueOutput
from nemorl_megatron.layout import choose
from nemorl_megatron.model import freeze_routers, train_mode
from nemorl_megatron.mtp import mtp_parameters
from nemorl_megatron.observing import observed
from nemorl_megatron.optim import Learner
from nemorl_megatron.parallel import Parallel, Sizes
from nemorl_megatron.pipeline import LastStage, Microbatch, microbatches, run
from nemorl_megatron.routers import Routers

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from nemorl.config.models import TrainingOptions
    from nemorl.resources.worker import WorkerContext
    from nemorl_tensors.filtering import TokenFilter

    from nemorl_megatron.config import MegatronConfig, MegatronGenerationConfig
    from nemorl_megatron.generation import MegatronGeneration
    from nemorl_megatron.lora import Adapters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUTER_DTYPES = {"float32": "fp32", "float64": "fp64"}


class MegatronBackend(RankBackend[Learner]):
    """``TrainingBackend`` over megatron-core: one process, or one rank of many that run the same calls."""

    _adapters: Adapters | None
    _work: WorkMeter
    _reference: list[GPTModel] | None

    def __init__(
        self, policy: TrainingOptions, worker: WorkerContext, config: MegatronConfig, *, reference: bool, head: Head
    ) -> None:
        super().__init__(policy, worker, reference=reference, head=head)
        self._config, self._seed = config, worker.seed
        self._mtp = config.mtp if head == "language_model" else None
        self._bridge = bridge_for(policy, head, self._mtp)
        self._parallel = Parallel.join(worker, Sizes.of(policy, config))
        self._pieces = self._build(worker.seed)
        if config.mtp is not None and not config.mtp.trains:
            for parameter in mtp_parameters(self._pieces):
                parameter.requires_grad_(False)
        if config.freeze_moe_router:
            freeze_routers(self._pieces)
        # A value head was not sampled from.
        replays = config.router.replay and head == "language_model"
        self._routers = Routers(self._pieces, self._parallel, config.router, replays=replays)
        self._has_gradient = False
        """Some loss since the last update had one, on this rank."""
        self._adapters = None
        if policy.lora is not None:
            self._adapters = self._bridge.adapt(self._pieces, self._parallel, policy.lora, worker.seed)
        # Adapters' dropout draws from the global generator, which checkpoints carry; on each rank for other tokens.
        torch.manual_seed(worker.seed + worker.rank)
        self._work = self._meter()
        self._reference = self._build(worker.seed, mtp=False) if reference and policy.lora is None else None
        for piece in self._reference or ():
            piece.requires_grad_(False)
        self._layout = choose(config.layout, self._pieces, self._parallel, self._bridge.vocabulary)
        self._residency = Residency(
            self._pieces, self._reference or (), lambda: self._made_optimizer, worker.device, config.offload.resting
        )
        self._residency.rest()

    def _build(self, seed: int, *, mtp: bool = True) -> list[GPTModel]:
        pieces = self._bridge.build(
            self._parallel,
            dtype=DTYPES[self._policy.precision],
            attention=self._config.attention,
            activation_checkpointing=self._policy.activation_checkpointing,
            mtp=mtp,
            calculate_per_token_loss=True,  # which is to say: gradients are sums
            **self._router_fields(),
        )
        self._bridge.load(pieces, self._parallel, seed)
        return pieces

    def _router_fields(self) -> dict[str, Any]:
        asked = ROUTER_DTYPES.get(self._config.router.dtype)
        # megatron-core would move biases as gradients are added up, whether there is an update or not.
        return {"moe_router_bias_update_rate": 0.0} | ({} if asked is None else {"moe_router_dtype": asked})

    def _meter(self) -> WorkMeter:
        parallel = self._parallel
        mtp = self._mtp
        ahead = None if mtp is None else MtpWork(mtp.num_layers, trains=mtp.trains, is_apart=mtp.is_apart)
        return WorkMeter.on(
            Model.trained(read_model_config(self._policy).to_dict(), self._policy, self._head, ahead),
            self._device,
            DTYPES[self._policy.precision],
            ranks_per_copy=parallel.world_size // parallel.data_parallel_size,
            largest=parallel.largest,
        )

    def _make_optimizer(self) -> Learner:
        stored = (
            partial(self._bridge.stored, self._pieces, self._parallel, self._seed) if self._adapters is None else None
        )
        mtp = self._mtp
        apart = mtp_parameters(self._pieces) if mtp is not None and mtp.trains and mtp.is_apart else None
        return Learner(self._pieces, self._policy, stored, distributed=self._config.distributed_optimizer, mtp=apart)

    def _forward_backward(self, batch: TokenBatch, loss: Loss, into: Tensor | None) -> Metrics:
        candidates = "candidate_ids" in loss.requires
        learner = self._optimizer

        # 1. Forward and backward, microbatch by microbatch: gradients add up, over ranks when there is an update.
        if self._routers.replays:
            require_routes(batch)
        trained, measured = batch, batch.select([])
        if not self._routers.are_balanced and (self._mtp is None or not self._mtp.trains):
            trained, measured = split_by_gradient(batch, loss, self._budget, self._layout.computed_tokens)
        with self._routers.counting(int(fed_lengths(batch).sum()), len(batch)):
            parts = self._microbatches(trained, candidates=candidates, mtp=self._mtp)
            sharing = self._layout.metrics(part.rows for part in parts)
            self._count(parts, backward=True)
            train_mode(self._pieces, True)
            try:
                found = self._run(learner.pieces, self._pieces, parts, self._backward_of(loss, into), backward=True)
            finally:
                train_mode(self._pieces, False)

            # 2. Forward alone, of sequences that have no gradient: metrics are of all.
            found += self._forward_only(evaluate_without_gradient, measured, loss, into)
        return {**self._metrics_of(batch, found, into), **gradient_metrics(loss, trained, measured), **sharing}

    def _forward(self, batch: TokenBatch, loss: Loss, into: Tensor) -> Metrics:
        return self._metrics_of(batch, self._forward_only(evaluate_loss, batch, loss, into), into)

    def _update(self, adam: AdamStep | None) -> StepResult:
        learner = self._optimizer
        learner.add_up()
        trained = bool(self._parallel.largest(self._has_gradient))
        with self._room_for_states():
            result = learner.step(adam, trained=trained)
        self._has_gradient = False
        of_routers = self._routers.updated(moves=trained and not result.skipped)
        return replace(result, metrics={**result.metrics, **of_routers})

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        self._routers.clear()
        self._has_gradient = False

    def _forward_only(self, evaluate: Evaluate, batch: TokenBatch, loss: Loss, into: Tensor | None) -> list[Any]:
        if not self._parallel.largest(len(batch)):
            return []
        parts = self._microbatches(batch, candidates="candidate_ids" in loss.requires)
        self._count(parts, backward=False)
        return self._run(self._pieces, self._pieces, parts, self._evaluated(evaluate, loss, into))

    def _metrics_of(self, batch: TokenBatch, found: list[Any], into: Tensor | None) -> Metrics:
        found = self._parallel.from_last_stage(found)
        if into is not None:
            self._parallel.from_last_stage(into)
        return pass_metrics(batch, [of_part for of_part, _ in found], [value for _, value in found])

    def _score_likeliest(self, batch: TokenBatch, k: int, ids: Tensor, logprobs: Tensor) -> None:
        head = self._output_head(self._pieces)

        def likeliest(states: Tensor, _targets: Tensor) -> Sequence[Tensor]:
            assert isinstance(head, OutputHead), "scoring happens on the last stage"
            return vocab_parallel_topk_logprobs(
                states,
                head.weight,
                k,
                first=head.first,
                group=head.group,
                temperature=batch.temperature,
                softcap=head.cap,
            )

        self._measure(batch, self._pieces, likeliest, [ids, logprobs])

    def observe(self, token_ids: Sequence[int]) -> Activations:
        self._require_head("language_model", "logits")
        self._residency.require("weights")
        recorder, head = Recorder(), self._output_head(self._pieces)

        def score(states: Tensor, _targets: Tensor) -> Sequence[Tensor]:
            assert isinstance(head, OutputHead), "a whole model has its head"
            recorder.add_last("logits", head.logits(states))
            return []

        batch = TokenBatch.from_sequences([token_ids], [[False] + [True] * (len(token_ids) - 1)])
        with observed(self._pieces, self._parallel, recorder):
            self._measure(batch, self._pieces, score, [])
        return recorder.activations()

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        self._residency.require("weights")
        yield from self._bridge.export(self._pieces, self._parallel, self._adapters)

    def _pieces_of_rank(self) -> Iterator[Piece]:
        return self._bridge.pieces(self._pieces, self._parallel, self._adapters)

    def _write_adapters(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        export.save_adapters(path, self._policy, tensors)

    def checkpoint_files(self, *, optimizer: bool) -> RankFiles:
        self._residency.require("weights", "optimizer")
        learner = self._optimizer  # first: making it moves the weights to memory of its own
        return checkpoint.contents(self._held(), learner, self._parallel, with_moments=optimizer)

    def load_checkpoint(self, path: Path) -> None:
        self._residency.require("weights", "optimizer")
        learner = self._optimizer
        checkpoint.load(path, self._held(), learner, self._parallel)

    def save_pretrained(self, path: Path) -> None:
        buckets = export.with_copies(self.export_weights(), self._bridge.copies)
        export.save_pretrained(path, self._policy, buckets, self._parallel.rank, self._head)

    def generator(self, options: MegatronGenerationConfig) -> MegatronGeneration:
        """A generator on this rank's pieces of the policy as they are at any time. All ranks make the same calls."""
        from nemorl_megatron.generation import MegatronGeneration

        return MegatronGeneration(
            self._pieces,
            self._parallel,
            self._bridge,
            self._policy,
            options,
            require_weights=partial(self._residency.require, "weights"),
        )

    def _release(self) -> None:
        del self._pieces
        self._parallel.leave()

    def _backward_of(self, loss: Loss, into: Tensor | None) -> LastStage:
        """The loss of a microbatch, which leads back to all layers; its metrics and value."""
        evaluated = self._evaluated(evaluate_loss, loss, into)

        def of(states: Tensor, part: Microbatch) -> tuple[Tensor, Any]:
            value, result = evaluated(states, part)
            self._has_gradient |= value.requires_grad
            # Zero, and yet it leads back to all layers: every rank takes part in every backward pass.
            return value if value.requires_grad else value + states.sum() * 0.0, result

        return of

    def _evaluated(self, evaluate: Evaluate, loss: Loss, into: Tensor | None) -> LastStage:
        """The loss of a microbatch, its metrics and value. What the loss was given goes ``into``."""
        head = self._output_head(self._pieces)

        def of(states: Tensor, part: Microbatch) -> tuple[Tensor, tuple[Metrics, Tensor]]:
            assert head is not None, "losses are computed on the last stage"
            rows, batch = part.rows, part.batch
            shape = output_shape(batch, candidates=rows.target_ids.ndim > 1)
            outputs = torch.zeros(shape, dtype=torch.float32, device=states.device)
            if rows.targets.numel():
                scores = head.score(part.predicting(states), rows.target_ids, batch.temperature, keep=batch.keep)
                outputs = outputs.index_copy(0, rows.targets, scores)
            if self._parallel.sizes.context > 1:
                outputs = added_up(outputs, self._parallel.context_group)
            if into is not None:
                into[batch[PLACE]] = outputs.detach()
            value, metrics = evaluate(loss, outputs, batch)
            found = value.detach().double().cpu()
            if part.ahead is not None:
                assert isinstance(head, OutputHead), "MTP is a language model's"
                logprobs = outputs if outputs.ndim == 1 else None
                added, of_mtp = part.ahead.loss(head, states, batch, logprobs, self._parallel)
                value, metrics = value + added, {**metrics, **of_mtp}
            return value, (metrics, found)

        return of

    def _score(self, batch: TokenBatch, weights: WeightsName, keep: TokenFilter | None, into: Tensor) -> None:
        pieces = self._reference if weights == "reference" and self._reference is not None else self._pieces
        head = self._output_head(pieces)

        def score(states: Tensor, targets: Tensor) -> Sequence[Tensor]:
            assert head is not None, "scoring happens on the last stage"
            return [head.score(states, targets, batch.temperature, keep=keep)]

        self._measure(batch, pieces, score, [into], routed=weights == "policy")

    def _measure(
        self,
        batch: TokenBatch,
        pieces: Sequence[GPTModel],
        read: Callable[[Tensor, Tensor], Sequence[Tensor]],
        into: Sequence[Tensor],
        *,
        routed: bool = True,
    ) -> None:
        """Write what ``read`` says of scored tokens, from states [M, H] and ids [M], to their places in ``into``."""

        def fill(states: Tensor, part: Microbatch) -> tuple[Tensor, None]:
            rows = part.rows
            if rows.targets.numel():
                places = part.batch[PLACE][rows.targets]
                for whole_batch, found in zip(into, read(part.predicting(states), rows.target_ids), strict=True):
                    whole_batch[places] = found
            return states.new_zeros(()), None

        self._run(pieces, pieces, self._microbatches(with_places(bare(batch)), routed=routed), fill)
        for found in into:
            if self._parallel.sizes.context > 1:
                torch.distributed.all_reduce(found, group=self._parallel.context_group)
            self._parallel.from_last_stage(found)

    def _count(self, parts: Sequence[Microbatch], *, backward: bool) -> None:
        for part in parts:
            self._work.add(part.rows, backward=backward, parts=self._parallel.sizes.context)

    def _microbatches(self, batch: TokenBatch, *, routed: bool = True, **asked: Any) -> Sequence[Microbatch]:
        """Passes over a batch. Unless they are ``routed``, routers choose all experts by themselves."""
        dtype = DTYPES[self._policy.precision]
        parts = microbatches(batch, self._budget, self._parallel, self._layout, dtype=dtype, **asked)
        return [replace(part, visits=self._routers.visits(part.rows)) for part in parts] if routed else parts

    def _run(
        self,
        called: Sequence[torch.nn.Module],
        pieces: Sequence[GPTModel],
        parts: Sequence[Microbatch],
        on_last_stage: LastStage,
        *,
        backward: bool = False,
    ) -> list[Any]:
        with self._room_for_microbatches():
            return run(called, parts, self._output_head(pieces), on_last_stage, self._parallel, backward=backward)

    def _output_head(self, pieces: Sequence[GPTModel]) -> AnyHead | None:
        """Of a model whose last stage is on this rank."""
        if not self._parallel.is_last_stage:
            return None
        if self._head == "value":
            return ValueOutput(pieces[-1], self._parallel)
        return OutputHead(pieces[-1], self._parallel, self._bridge.vocabulary, self._bridge.logit_cap)

    def _held(self) -> list[checkpoint.Held]:
        """The weights that a checkpoint holds: the whole model, or the adapters on it."""
        held = checkpoint.held(self._pieces)
        return held if self._adapters is None else [(whole, parts) for whole, parts in held if whole.requires_grad]
