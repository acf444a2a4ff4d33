"""The training backend ``megatron``: one rank of a policy that learns over megatron-core.

# N = tokens of all sequences concatenated, M = scored tokens, K = candidates of each

A step is: plan microbatches and run them through megatron-core's schedule (``pipeline``), where the last stage turns
hidden states into log-probs (``head``) and those into the loss; then one optimizer step (``optim``). Losses are sums
over tokens with weights that were normalised on the driver, so microbatches and ranks simply add up. The ranks of one
copy of the model are given the same shard of the data, and what the last stage finds all of them return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts import Head, Loss, WeightsName
from nemorl.contracts.memory import DeviceMemoryError, MemoryPart
from nemorl.errors import UsageError
from nemorl.metrics import Metrics
from nemorl_rl.planning.work import Model, WorkMeter
from nemorl_tensors import TokenBatch, vocab_parallel_topk_logprobs
from nemorl_tensors.engines.checkpoint_files import CheckpointWriter, RankFiles
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.no_gradient import evaluate_without_gradient, gradient_metrics, split_by_gradient
from nemorl_tensors.engines.observing import Activations, Recorder
from nemorl_tensors.engines.pieces import PieceSender, RankPieces
from nemorl_tensors.engines.residency import Residency
from nemorl_tensors.engines.rows import default_microbatch_tokens
from nemorl_tensors.engines.schedules import require_end
from nemorl_tensors.engines.steps import PLACE, evaluate_loss, output_shape, require_fields, step_metrics, with_places
from torch import Tensor

from nemorl_megatron import checkpoint, export
from nemorl_megatron.bridge import bridge_for
from nemorl_megatron.context import added_up
from nemorl_megatron.head import AnyHead, OutputHead, ValueOutput
from nemorl_megatron.layout import choose
from nemorl_megatron.model import freeze_routers, train_mode
from nemorl_megatron.observing import observed
from nemorl_megatron.optim import Learner
from nemorl_megatron.parallel import Parallel, Sizes
from nemorl_megatron.pipeline import LastStage, Microbatch, microbatches, run

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from nemorl.config.models import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl_tensors.filtering import TokenFilter

    from nemorl_megatron.config import MegatronConfig, MegatronGenerationConfig
    from nemorl_megatron.generation import MegatronGeneration
    from nemorl_megatron.lora import Adapters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUTER_DTYPES: dict[str | None, str] = {"float32": "fp32", "float64": "fp64"}


class MegatronBackend(CheckpointWriter):
    """``TrainingBackend`` over megatron-core: one process, or one rank of many that run the same calls."""

    def __init__(
        self, policy: PolicyConfig, worker: WorkerContext, config: MegatronConfig, *, reference: bool, head: Head
    ) -> None:
        require_end(policy.schedule)
        self._policy, self._config, self._device = policy, config, worker.device
        self._budget = policy.microbatch_tokens or default_microbatch_tokens(worker.device)
        self._head_kind, self._bridge = head, bridge_for(policy, head)
        self._sender, self._parallel = PieceSender(), Parallel.join(worker, Sizes.of(policy, config))
        self._seed = worker.seed
        self._pieces = self._build(worker.seed)
        if config.freeze_moe_router:
            freeze_routers(self._pieces)
        self._adapters: Adapters | None = None
        if policy.lora is not None:
            self._adapters = self._bridge.adapt(self._pieces, self._parallel, policy.lora, worker.seed)
        # Adapters' dropout draws from the global generator, which checkpoints carry; on each rank for other tokens.
        torch.manual_seed(worker.seed + worker.rank)
        self._work, self._has_reference = self._meter(), reference
        self._reference = self._build(worker.seed) if reference and policy.lora is None else None
        for piece in self._reference or ():
            piece.requires_grad_(False)
        self._layout = choose(config.layout, self._pieces, self._parallel, self._bridge.vocabulary)
        self._residency = Residency(self._pieces, self._reference or (), lambda: self.__dict__.get("_learner"))

    def _build(self, seed: int) -> list[GPTModel]:
        pieces = self._bridge.build(
            self._parallel,
            dtype=DTYPES[self._policy.precision],
            attention=self._config.attention,
            activation_checkpointing=self._policy.activation_checkpointing,
            calculate_per_token_loss=True,  # which is to say: gradients are sums
            moe_router_dtype=ROUTER_DTYPES.get(self._config.router_precision),
        )
        self._bridge.load(pieces, self._parallel, seed)
        return pieces

    def _meter(self) -> WorkMeter:
        parallel = self._parallel
        return WorkMeter.on(
            Model.of(
                read_model_config(self._policy).to_dict(),
                has_vocabulary_head=self._head_kind == "language_model",
                is_frozen=self._adapters is not None,
                recomputes_layers=self._policy.activation_checkpointing,
            ),
            self._device,
            DTYPES[self._policy.precision],
            ranks_per_copy=parallel.world_size // parallel.data_parallel_size,
            largest=parallel.largest,
        )

    @cached_property
    def _learner(self) -> Learner:
        """Made when first asked for: a teacher needs none, and float32 masters are twice a bfloat16 model's memory."""
        stored = (
            partial(self._bridge.stored, self._pieces, self._parallel, self._seed) if self._adapters is None else None
        )
        return Learner(self._pieces, self._policy, stored, distributed=self._config.distributed_optimizer)

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        require_fields(batch, loss)
        self._residency.require("weights", "gradients", "optimizer")
        self._work.begin()
        candidates = "candidate_ids" in loss.requires
        learner = self._learner
        learner.clear_gradients()
        self._has_gradient = False

        # 1. Forward and backward, microbatch by microbatch: gradients add up, over ranks too.
        trained, measured = split_by_gradient(batch, loss, self._budget, self._layout.computed_tokens)
        parts = self._microbatches(trained, candidates=candidates)
        sharing = self._layout.metrics(part.rows for part in parts)
        self._count(parts, backward=True)
        train_mode(self._pieces, True)
        try:
            found = self._run(learner.pieces, self._pieces, parts, self._evaluate(loss), backward=True)
        finally:
            train_mode(self._pieces, False)

        # 2. Forward alone, of sequences that have no gradient: metrics are of all.
        if self._parallel.largest(len(measured)):
            parts = self._microbatches(measured, candidates=candidates)
            self._count(parts, backward=False)
            found += self._run(self._pieces, self._pieces, parts, self._evaluate(loss, backward=False))
        found = self._parallel.from_last_stage(found)

        # 3. One update.
        result = learner.step(trained=bool(self._parallel.largest(self._has_gradient)))
        return {
            **step_metrics(batch, [of_part for of_part, _ in found], [value for _, value in found], result),
            **gradient_metrics(loss, trained, measured),
            **sharing,
            **self._work.metrics(batch),
        }

    def get_logprobs(self, batch: TokenBatch, weights: WeightsName = "policy") -> Tensor:
        self._require_head("language_model", "log-probs")
        pieces, adapters_off = self._weights(weights)
        # The reference is compared with over the whole vocabulary: it was no sampler.
        keep = batch.keep.alone if batch.keep is not None and weights == "policy" else None
        with adapters_off:
            return self._scores(batch, pieces, keep)

    def get_values(self, batch: TokenBatch) -> Tensor:
        self._require_head("value", "values")
        return self._scores(batch, self._weights("policy")[0])

    def get_topk_logprobs(self, batch: TokenBatch, k: int) -> tuple[Tensor, Tensor]:
        self._require_head("language_model", "log-probs")
        ids = torch.zeros((batch.num_tokens, k), dtype=torch.int64, device=self._device)
        logprobs = torch.zeros((batch.num_tokens, k), dtype=torch.float32, device=self._device)
        pieces, _ = self._weights("policy")
        head = self._head(pieces)

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

        self._measure(batch, pieces, likeliest, [ids, logprobs])
        return ids.to(batch.token_ids.device), logprobs.to(batch.token_ids.device)

    def observe(self, token_ids: Sequence[int]) -> Activations:
        self._require_head("language_model", "logits")
        pieces, _ = self._weights("policy")
        recorder, head = Recorder(), self._head(pieces)

        def score(states: Tensor, _targets: Tensor) -> Sequence[Tensor]:
            assert isinstance(head, OutputHead), "a whole model has its head"
            recorder.add_last("logits", head.logits(states))
            return []

        batch = TokenBatch.from_sequences([token_ids], [[False] + [True] * (len(token_ids) - 1)])
        with observed(pieces, self._parallel, recorder):
            self._measure(batch, pieces, score, [])
        return recorder.activations()

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        self._residency.require("weights")
        yield from self._bridge.export(self._pieces, self._parallel, self._adapters)

    def export_adapters(self) -> Iterator[Mapping[str, Tensor]]:
        yield from self._own_adapters().published()

    def save_adapters(self, path: Path) -> None:
        export.save_adapters(path, self._policy, self.export_adapters(), self._parallel.rank)

    def publish_pieces(self, transport: str) -> RankPieces:
        self._residency.require("weights")
        pieces = partial(self._bridge.pieces, self._pieces, self._parallel, self._adapters)
        return self._sender.publish(transport, pieces)

    def withdraw_pieces(self) -> None:
        self._sender.close()

    def checkpoint_files(self, *, optimizer: bool) -> RankFiles:
        self._residency.require("weights", "optimizer")
        learner = self._learner  # first: making it moves the weights to memory of its own
        return checkpoint.contents(self._held(), learner, self._parallel, with_moments=optimizer)

    def load_checkpoint(self, path: Path) -> None:
        self._residency.require("weights", "optimizer")
        learner = self._learner
        checkpoint.load(path, self._held(), learner, self._parallel)

    def scale_rate(self, factor: float) -> None:
        self._learner.rate_scale *= factor

    def save_pretrained(self, path: Path) -> None:
        export.save_pretrained(path, self._policy, self.export_weights(), self._parallel.rank, self._head_kind)

    def generator(self, options: MegatronGenerationConfig) -> MegatronGeneration:
        """What speaks with this rank's pieces of the policy as they are at any time. All ranks make the same calls."""
        from nemorl_megatron.generation import MegatronGeneration

        return MegatronGeneration(
            self._pieces,
            self._parallel,
            self._bridge,
            self._policy,
            options,
            require_weights=partial(self._residency.require, "weights"),
        )

    def offload(self, parts: Sequence[MemoryPart]) -> None:
        self._residency.offload(parts)

    def onload(self, parts: Sequence[MemoryPart]) -> None:
        self._residency.onload(parts)

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        return self._residency.held_bytes()

    def remarks(self) -> Sequence[str]:
        return self._layout.remarks

    def shutdown(self) -> None:
        self.end_writing()
        self._sender.close()
        for name in ("_residency", "_pieces", "_reference", "_learner"):
            self.__dict__.pop(name, None)
        self._parallel.leave()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _evaluate(self, loss: Loss, *, backward: bool = True) -> LastStage:
        """The loss of a microbatch, and its metrics and value."""
        head, evaluate = self._head(self._pieces), evaluate_loss if backward else evaluate_without_gradient

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
            value, metrics = evaluate(loss, outputs, batch)
            self._has_gradient |= value.requires_grad
            if backward and not value.requires_grad:
                # Zero, and yet it leads back to all layers: every rank takes part in every backward pass.
                value = value + states.sum() * 0.0
            return value, (metrics, value.detach().double().cpu())

        return of

    def _scores(self, batch: TokenBatch, pieces: Sequence[GPTModel], keep: TokenFilter | None = None) -> Tensor:
        """[N] what the head says of scored tokens, where ``batch`` is."""
        found = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self._device)
        head = self._head(pieces)

        def score(states: Tensor, targets: Tensor) -> Sequence[Tensor]:
            assert head is not None, "scoring happens on the last stage"
            return [head.score(states, targets, batch.temperature, keep=keep)]

        self._measure(batch, pieces, score, [found])
        return found.to(batch.token_ids.device)

    def _measure(
        self,
        batch: TokenBatch,
        pieces: Sequence[GPTModel],
        read: Callable[[Tensor, Tensor], Sequence[Tensor]],
        into: Sequence[Tensor],
    ) -> None:
        """Write what ``read`` says of scored tokens, from states [M, H] and ids [M], to their places in ``into``."""

        def fill(states: Tensor, part: Microbatch) -> tuple[Tensor, None]:
            rows = part.rows
            if rows.targets.numel():
                places = part.batch[PLACE][rows.targets]
                for whole_batch, found in zip(into, read(part.predicting(states), rows.target_ids), strict=True):
                    whole_batch[places] = found
            return states.new_zeros(()), None

        self._run(pieces, pieces, self._microbatches(with_places(batch)), fill)
        for found in into:
            if self._parallel.sizes.context > 1:
                torch.distributed.all_reduce(found, group=self._parallel.context_group)
            self._parallel.from_last_stage(found)

    def _count(self, parts: Sequence[Microbatch], *, backward: bool) -> None:
        for part in parts:
            self._work.add(part.rows, backward=backward, parts=self._parallel.sizes.context)

    def _microbatches(self, batch: TokenBatch, *, candidates: bool = False) -> Sequence[Microbatch]:
        dtype = DTYPES[self._policy.precision]
        return microbatches(batch, self._budget, self._parallel, self._layout, dtype=dtype, candidates=candidates)

    def _run(
        self,
        called: Sequence[torch.nn.Module],
        pieces: Sequence[GPTModel],
        parts: Sequence[Microbatch],
        on_last_stage: LastStage,
        *,
        backward: bool = False,
    ) -> list[Any]:
        try:
            return run(called, parts, self._head(pieces), on_last_stage, self._parallel, backward=backward)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"out of memory on {self._device} with microbatches of {self._budget} tokens: {error}",
                fix=f"set policy.microbatch_tokens: {max(1, self._budget // 2)} or policy.activation_checkpointing: "
                "true",
            ) from error

    def _head(self, pieces: Sequence[GPTModel]) -> AnyHead | None:
        """Of a model whose last stage is on this rank."""
        if not self._parallel.is_last_stage:
            return None
        if self._head_kind == "value":
            return ValueOutput(pieces[-1], self._parallel)
        return OutputHead(pieces[-1], self._parallel, self._bridge.vocabulary, self._bridge.logit_cap)

    def _require_head(self, head: Head, what: str) -> None:
        if self._head_kind != head:
            raise UsageError(
                f"this model has no {what}: it was built with head={self._head_kind!r}",
                fix=f"build it with head={head!r}",
            )

    def _held(self) -> list[checkpoint.Held]:
        """What a checkpoint holds: the whole model, or the adapters on it."""
        held = checkpoint.held(self._pieces)
        return held if self._adapters is None else [(whole, parts) for whole, parts in held if whole.requires_grad]

    def _own_adapters(self) -> Adapters:
        self._residency.require("weights")
        if self._adapters is None:
            raise UsageError(
                "this policy has no adapters: all of its weights are trained",
                fix="set policy.lora, or export the whole model",
            )
        return self._adapters

    def _weights(self, weights: WeightsName) -> tuple[Sequence[GPTModel], AbstractContextManager[None]]:
        self._residency.require("reference" if weights == "reference" and self._reference is not None else "weights")
        if weights == "policy":
            return self._pieces, nullcontext()
        if not self._has_reference:
            raise UsageError(
                "this policy keeps no reference weights: it was built with reference=False",
                fix="build it with reference=True (a config does when its algorithm compares with the initial policy)",
            )
        if self._adapters is not None:
            return self._pieces, self._adapters.disabled()
        assert self._reference is not None
        return self._reference, nullcontext()
