"""The training backend ``dtensor``: one rank of a Hugging Face policy that learns.

# N = tokens of all sequences concatenated, B = sequences, M = scored tokens

A step is: plan microbatches (``nemorl_tensors.engines.rows``), for each one rows -> hidden states -> log-probs
(``model_head``) -> loss -> backward, then one optimizer step (``optim``). Losses are sums over tokens with weights that
were normalised on the driver, so microbatches add up. Only adapters have dropout: two passes would differ by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from nemorl.config.models import MuonConfig
from nemorl.contracts import AdamStep, AdapterShape, Head, Loss, WeightsName
from nemorl.errors import BackendError, UsageError, boundary
from nemorl.metrics import Metrics
from nemorl_rl.planning.work import Model, WorkMeter
from nemorl_tensors import TokenBatch
from nemorl_tensors.devices import moved
from nemorl_tensors.engines.buckets import in_buckets
from nemorl_tensors.engines.checkpoint_files import RankFiles
from nemorl_tensors.engines.model_folder import save_processor, save_tokenizer
from nemorl_tensors.engines.no_gradient import evaluate_without_gradient, gradient_metrics, split_by_gradient
from nemorl_tensors.engines.observing import Activations
from nemorl_tensors.engines.pieces import Piece
from nemorl_tensors.engines.rank_backend import RankBackend
from nemorl_tensors.engines.residency import Residency
from nemorl_tensors.engines.routers import require_routes
from nemorl_tensors.engines.rows import Rows, fed_lengths
from nemorl_tensors.engines.steps import (
    PLACE,
    Evaluate,
    StepResult,
    bare,
    evaluate_loss,
    loss_owner,
    output_shape,
    pass_metrics,
    with_places,
)
from nemorl_tensors.filtering import TokenFilter
from torch import Tensor

from nemorl_dtensor import checkpoint
from nemorl_dtensor.allocator import keep_freed_memory
from nemorl_dtensor.assembly import AnyScorer, assemble
from nemorl_dtensor.exported import ExportedWeights, save_pretrained
from nemorl_dtensor.model import sight_of
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.model_lora import Adapters
from nemorl_dtensor.observing import observe_scoring
from nemorl_dtensor.optim import Optimizer, norm_of_whole
from nemorl_dtensor.origin import Origin
from nemorl_dtensor.ranks import Ranks
from nemorl_dtensor.router_loads import router_biases
from nemorl_dtensor.routing import Routers
from nemorl_dtensor.sharded_head import ShardedScorer
from nemorl_dtensor.sharding import hidden_matrices
from nemorl_dtensor.shelf import Shelf
from nemorl_dtensor.verification import verified_layout

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.resources.worker import WorkerContext

    from nemorl_dtensor.config import DTensorConfig


GIB = 1024**3


class DTensorBackend(RankBackend[Optimizer]):
    """``TrainingBackend`` over PyTorch and transformers: one process, or one rank of many that run the same calls."""

    _adapters: Adapters | None
    _work: WorkMeter
    _reference: AnyScorer | None

    def __init__(
        self, policy: TrainingOptions, worker: WorkerContext, config: DTensorConfig, *, reference: bool, head: Head
    ) -> None:
        super().__init__(policy, worker, reference=reference, head=head)
        self._config = config
        # 1. The model, or this rank's part of it.
        self._ranks: Ranks | None = None
        if worker.world_size > 1 or config.offload.parameters:
            self._ranks = Ranks.join(
                worker,
                tensor_parallel=policy.tensor_parallel_size,
                replicas=config.data_parallel_replicas,
                expert_parallel=config.expert_parallel_size,
                context_parallel=config.context_parallel_size,
                parameters_on_host=config.offload.parameters,
            )
        assembly = assemble(policy, worker, config, self._ranks, reference=reference, head=head)
        self._model, self._scorer, self._reference = assembly.model, assembly.scorer, assembly.reference
        self._adapters, self._gradients, self._loads = assembly.adapters, assembly.gradients, assembly.loads

        # 2. It proves that it computes what transformers' own does, and which layouts it can.
        if assembly.frozen is not None and assembly.reference is not None:
            verified_layout(config, assembly.frozen, assembly.reference, packed=assembly.is_packed)
        self._layout = verified_layout(config, self._model, self._scorer, packed=assembly.is_packed)

        # 3. What steps, exports and checkpoints need. A value head was not sampled from.
        is_replayed = config.router.replay and head == "language_model"
        group = None if self._ranks is None else self._ranks.routing
        self._routers = Routers.of(self._model, group) if is_replayed else None
        keep_freed_memory(worker.device)
        self._exported = ExportedWeights(self._model, assembly.names, self._adapters, self._rank)
        rank, ranks = worker.rank, worker.world_size
        self._origin = Origin(policy, self._model, assembly.names, head, worker.seed, rank, ranks, worker.device)
        self._work = self._meter(config.logprob_chunk_tokens)
        # Adapters' dropout draws from the global generator, which checkpoints carry; on each rank for other sequences.
        torch.manual_seed(worker.seed + worker.rank)
        frozen = [] if assembly.frozen is None else [assembly.frozen]
        self._residency = Residency(
            [assembly.model], frozen, lambda: self._made_optimizer, worker.device, config.offload.resting
        )
        self._residency.rest()
        self._trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def _meter(self, chunk_tokens: int | None) -> WorkMeter:
        kind, ranks = self._model.dtype, self._ranks
        copies = ranks.tensor_parallel_size * ranks.context_parallel_size if ranks else 1
        return WorkMeter.on(
            Model.trained(self._model.config.to_dict(), self._policy, self._head),
            self._device,
            kind,
            ranks_per_copy=copies,
            logit_bytes=0 if copies > 1 or chunk_tokens is not None else kind.itemsize,
            largest=ranks.largest if ranks else int,
        )

    def _make_optimizer(self) -> Optimizer:
        policy = self._policy
        return Optimizer(
            self._trainable,
            policy.optimizer,
            policy.schedule,
            policy.max_grad_norm,
            total_norm=self._ranks.total_norm if self._ranks else norm_of_whole,
            matrices=hidden_matrices(self._model) if isinstance(policy.optimizer, MuonConfig) else (),
            gradients=self._gradients,
            refine=self._origin.refine,
        )

    @cached_property
    def _shelf(self) -> Shelf:
        if self._adapters is None:
            raise UsageError(
                "this policy has no adapters: all of its weights are trained, for one", fix="set policy.lora"
            )
        room_bytes = int(self._config.shelved_adapters_gib * GIB)
        return Shelf(self._adapters, self._trainable, self._optimizer, self._device, room_bytes)

    def add_adapter(self, name: str, shape: AdapterShape) -> None:
        self._shelf.add(name, shape)

    def use_adapter(self, name: str) -> None:
        self._residency.require("weights", "gradients", "optimizer")
        self._gathered = self._shelf.use(name, self._gathered)

    def load_adapter(self, path: Path) -> None:
        self._residency.require("weights", "gradients", "optimizer")
        self._shelf.load(path)
        self._gathered = "nothing"

    def remove_adapter(self, name: str) -> None:
        self._residency.require("weights", "gradients", "optimizer")
        self._gathered = self._shelf.remove(name, self._gathered)

    def _forward_backward(self, batch: TokenBatch, loss: Loss, into: Tensor | None) -> Metrics:
        optimizer = self._optimizer
        if self._adapters:
            self._adapters.train(True)

        # 1. Forward and backward, microbatch by microbatch: gradients add up.
        if self._routers is not None:
            require_routes(batch)
            self._routers.take_flipped()
        trained, measured = batch, batch.select([])
        if not self._loads.are_balanced:
            trained, measured = split_by_gradient(batch, loss, self._budget, self._layout.computed_tokens)
        found: list[tuple[Tensor, Metrics]] = []
        laid_out: list[Rows] = []
        plan = self._layout.plan(trained, self._budget)
        idle_passes = self._idle_passes(plan)
        with self._loads.counting(int(fed_lengths(batch).sum())):
            with self._room_for_microbatches(), self._routed():
                for sequences in plan:
                    value, metrics, rows = self._evaluated(evaluate_loss, loss, trained.select(sequences), into)
                    laid_out.append(rows)
                    if value.requires_grad:  # it does not where no token of the microbatch is trained on
                        with boundary(f"the backward pass of {loss_owner(loss)}", passing=(torch.OutOfMemoryError,)):
                            value.backward()  # type: ignore[no-untyped-call]
                        optimizer.accumulate()
                    found.append((value.detach(), metrics))
                for _ in range(idle_passes):
                    self._idle(self._scorer).backward()  # type: ignore[no-untyped-call]
                    optimizer.accumulate()

            # 2. Forward alone, of sequences that have no gradient: metrics are of all.
            found += self._without_gradient(evaluate_without_gradient, measured, loss, into)
        if self._adapters:
            self._adapters.train(False)
        return {
            **_metrics_of(batch, found),
            **gradient_metrics(loss, trained, measured),
            **self._layout.metrics(laid_out),
            **({} if self._routers is None else {"routes_flipped": self._routers.take_flipped()}),
        }

    def _forward(self, batch: TokenBatch, loss: Loss, into: Tensor) -> Metrics:
        return _metrics_of(batch, self._without_gradient(evaluate_loss, batch, loss, into))

    def _update(self, adam: AdamStep | None) -> StepResult:
        with self._room_for_states():
            result = self._optimizer.step(adam)
        return replace(result, metrics=self._loads.updated(moves=not result.skipped))

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        self._loads.clear()

    def _score(self, batch: TokenBatch, weights: WeightsName, keep: TokenFilter | None, into: Tensor) -> None:
        scorer = self._reference if weights == "reference" and self._reference is not None else self._scorer
        routed = weights == "policy"
        self._measure(
            batch, scorer, lambda rows: [scorer.score(rows, batch.temperature, keep=keep)], [into], routed=routed
        )

    def _score_likeliest(self, batch: TokenBatch, k: int, ids: Tensor, logprobs: Tensor) -> None:
        scorer = self._scorer
        assert isinstance(scorer, Scorer | ShardedScorer), "a language model scores tokens"
        self._measure(batch, scorer, lambda rows: scorer.topk(rows, batch.temperature, k), [ids, logprobs])

    def observe(self, token_ids: Sequence[int]) -> Activations:
        self._require_head("language_model", "log-probs")
        if not isinstance(self._scorer, Scorer):
            raise BackendError("activations of a model that is spread over ranks are in parts", fix="use one worker")
        self._residency.require("weights")
        batch = TokenBatch.from_sequences([token_ids], [[False] + [True] * (len(token_ids) - 1)])
        return observe_scoring(self._model, self._scorer, self._layout.rows(batch, width_multiple=1).to(self._device))

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        self._residency.require("weights")
        is_first = self._rank == 0
        yield from in_buckets(({name: t} if is_first else {}, t.nbytes) for name, t in self._exported.tensors())

    def _pieces_of_rank(self) -> Iterator[Piece]:
        return self._exported.pieces()

    def _write_adapters(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        assert self._adapters is not None, "the tensors are theirs"
        self._adapters.save(path, tensors, self._policy.model_name)

    def checkpoint_files(self, *, optimizer: bool) -> RankFiles:
        self._residency.require("weights", "optimizer")
        shape = None if self._adapters is None else self._adapters.shape
        return checkpoint.contents(
            self._trainable,
            self._optimizer,
            self._rank,
            with_optimizer=optimizer,
            adapter=shape,
            buffers=self._moved,
        )

    @property
    def _moved(self) -> Mapping[str, Tensor]:
        """What training moves beside parameters."""
        return {} if self._policy.lora else router_biases(self._model)

    def load_checkpoint(self, path: Path) -> None:
        self._residency.require("weights", "optimizer")
        saved = checkpoint.load(path, self._trainable, self._optimizer, self._rank, buffers=self._moved)
        if self._adapters is not None and saved is not None:
            self._adapters.shape = saved

    def save_pretrained(self, path: Path) -> None:
        self._residency.require("weights")
        save_pretrained(path, self._model, self._exported.tensors(), self._rank)
        if self._rank == 0:
            save_tokenizer(path, self._policy.model_name, self._policy.tokenizer)
            if sight_of(self._model, self._policy) is not None:
                save_processor(path, self._policy.model_name, self._policy.media.processor)

    def _release(self) -> None:
        del self._exported, self._model, self._scorer, self._loads, self._trainable, self._origin, self._gradients
        del self._routers
        if self._ranks is not None:
            self._ranks.leave()

    @torch.no_grad()
    def _without_gradient(
        self, evaluate: Evaluate, batch: TokenBatch, loss: Loss, into: Tensor | None
    ) -> list[tuple[Tensor, Metrics]]:
        """Loss and metrics of each microbatch."""
        plan = self._layout.plan(batch, self._budget)
        idle_passes = self._idle_passes(plan)
        with self._room_for_microbatches(), self._routed():
            found = [self._evaluated(evaluate, loss, batch.select(sequences), into)[:2] for sequences in plan]
            for _ in range(idle_passes):
                self._idle(self._scorer)
        return found

    def _evaluated(
        self, evaluate: Evaluate, loss: Loss, microbatch: TokenBatch, into: Tensor | None
    ) -> tuple[Tensor, Metrics, Rows]:
        """The loss of a microbatch, its metrics, and how it was laid out. What the loss was given goes ``into``."""
        candidates = "candidate_ids" in loss.requires
        rows, microbatch = self._rows(microbatch, candidates=candidates), microbatch.to(self._device)
        outputs = self._outputs(rows, microbatch, output_shape(microbatch, candidates=candidates))
        if into is not None:
            into[microbatch[PLACE]] = outputs.detach()
        return *evaluate(loss, outputs, microbatch), rows

    def _outputs(self, rows: Rows, microbatch: TokenBatch, shape: tuple[int, ...]) -> Tensor:
        """[N] (candidates: [N, K]) float32 log-probs or values of a microbatch, 0.0 where masked out."""
        self._work.add(rows, backward=torch.is_grad_enabled())
        here = self._own(rows)
        self._loads.see(here, len(microbatch))
        self._replay(here)
        outputs = torch.zeros(shape, dtype=torch.float32, device=microbatch.token_ids.device)
        if rows.targets.numel() == 0:
            # The other ranks may have something to score, and each pass takes all of them.
            return outputs + self._idle(self._scorer) if self._ranks else outputs
        scores = self._scorer.score(rows, microbatch.temperature, keep=microbatch.keep)
        return outputs.index_copy(0, rows.targets, scores)

    def _measure(
        self,
        batch: TokenBatch,
        scorer: AnyScorer,
        read: Callable[[Rows], Sequence[Tensor]],
        into: Sequence[Tensor],
        *,
        routed: bool = True,
    ) -> None:
        """Write what ``read`` says of the scored tokens ([M, …] each) to their places in ``into``, without gradient."""
        batch = with_places(bare(batch))
        # FSDP2 keeps buffers between passes, which must not become inference tensors.
        gradients = torch.no_grad() if self._ranks else torch.inference_mode()
        with self._room_for_microbatches(), self._routed(), gradients:
            plan = self._layout.plan(batch, self._budget)
            idle_passes = self._idle_passes(plan)
            for sequences in plan:
                microbatch = batch.select(sequences)
                rows = self._rows(microbatch)
                if rows.targets.numel() == 0:
                    idle_passes += 1 if self._ranks else 0  # the other ranks may have something to score
                    continue
                places = moved(microbatch[PLACE], self._device)[rows.targets]
                if routed:
                    self._replay(self._own(rows))
                for whole_batch, found in zip(into, read(rows), strict=True):
                    whole_batch[places] = found
            for _ in range(idle_passes):
                self._idle(scorer)

    def _own(self, rows: Rows) -> Rows:
        """The tokens of rows that this rank computes, as routers are told of them."""
        has_routers = self._loads.exist or self._routers is not None
        return self._scorer.own(rows) if isinstance(self._scorer, ShardedScorer) and has_routers else rows

    def _rows(self, microbatch: TokenBatch, *, candidates: bool = False) -> Rows:
        """A microbatch on the host, laid out there and sent to the device at once."""
        multiple = self._scorer.width_multiple if isinstance(self._scorer, ShardedScorer) else 1
        on_cpu = self._device == "cpu"
        laid_out = self._layout.rows(microbatch, width_multiple=multiple, candidates=candidates, repeat_widths=on_cpu)
        return laid_out.to(self._device)

    def _replay(self, rows: Rows) -> None:
        """Send the tokens of the next pass, and of its repetition in the backward pass, where the sampler sent them."""
        if self._routers is not None:
            self._routers.replay(rows.routes)

    @contextmanager
    def _routed(self) -> Iterator[None]:
        """Around passes that may be replayed: afterwards routers choose by themselves."""
        try:
            yield
        finally:
            if self._routers is not None:
                self._routers.replay(None)

    def _idle_passes(self, plan: Sequence[Sequence[int]]) -> int:
        """Passes with nothing to score that make this rank's number that of the rank with the most microbatches."""
        return self._ranks.largest(len(plan)) - len(plan) if self._ranks else 0

    def _idle(self, scorer: AnyScorer) -> Tensor:
        assert isinstance(scorer, ShardedScorer), "one rank alone has nobody to wait for"
        self._loads.see(None)
        if self._routers is not None:
            self._routers.replay(None)
        return scorer.idle(self._device)


def _metrics_of(batch: TokenBatch, found: Sequence[tuple[Tensor, Metrics]]) -> Metrics:
    return pass_metrics(batch, [metrics for _, metrics in found], [value.double() for value, _ in found])
