"""The base of training backends: what one rank of a policy does, whichever library its model is of.

# N = tokens of all sequences concatenated, K = likeliest tokens of each

Here: which head, weights and parts may be asked for, what leaves the rank, and what is said when memory ends. Not here:
how a model is built, how rows run through it (``train_step``), and what a checkpoint holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from nemorl.contracts import AdamStep, Head, Loss, WeightsName
from nemorl.contracts.memory import DeviceMemoryError, MemoryPart
from nemorl.errors import BackendError, UsageError
from nemorl.metrics import Metrics
from torch import Tensor

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.devices import empty_cache
from nemorl_tensors.engines.checkpoint_files import CheckpointWriter
from nemorl_tensors.engines.layouts import Layout
from nemorl_tensors.engines.pieces import Piece, PieceSender, RankPieces
from nemorl_tensors.engines.residency import OptimizerMemory, Residency
from nemorl_tensors.engines.rows import default_microbatch_tokens
from nemorl_tensors.engines.steps import (
    StepResult,
    output_shape,
    require_end,
    require_fields,
    update_metrics,
    with_places,
)
from nemorl_tensors.filtering import TokenFilter

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.resources.worker import WorkerContext


class Adapters(Protocol):
    """LoRA adapters on a model."""

    def disabled(self) -> AbstractContextManager[Any]:
        """Within it the model is the reference policy."""
        ...

    def published(self) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of whole factors under the names of peft's files. Collective; read on rank 0."""
        ...


class RankOptimizer(OptimizerMemory, Protocol):
    """An optimizer with its schedule."""

    rate_scale: float
    """Multiplies the learning rate of the schedule."""

    def clear_gradients(self) -> None:
        """Forget them."""
        ...


class Meter(Protocol):
    """Counts the work of a step."""

    def begin(self) -> None: ...

    def metrics(self, batch: TokenBatch) -> Metrics:
        """Of what was done since ``begin``. Collective."""
        ...


Gathered = Literal["nothing", "whole", "part"]
"""Gradients since the last update: none, those of whole calls, or what a call that failed midway has left."""

Optimizer = TypeVar("Optimizer", bound=RankOptimizer)


class RankBackend(CheckpointWriter, ABC, Generic[Optimizer]):
    """One rank of a ``TrainingBackend``, made by a subclass that has the model.

    Its ``__init__`` sets the attributes that are annotated here.
    """

    _adapters: Adapters | None
    _reference: object | None
    """The frozen initial weights, where they are asked for and no adapter can be turned off to get them."""
    _layout: Layout
    _residency: Residency
    _work: Meter

    def __init__(self, policy: TrainingOptions, worker: WorkerContext, *, reference: bool, head: Head) -> None:
        require_end(policy.schedule)
        self._policy, self._device, self._rank = policy, worker.device, worker.rank
        self._budget = policy.microbatch_tokens or default_microbatch_tokens(worker.device)
        self._has_reference, self._head = reference, head
        self._sender = PieceSender()
        self._made_optimizer: Optimizer | None = None
        self._gathered: Gathered = "nothing"
        self._is_open = True

    @property
    def _optimizer(self) -> Optimizer:
        """Made when first asked for: a teacher needs none, and float32 masters are twice a bfloat16 model's memory."""
        if self._made_optimizer is None:
            with self._room_for_states():
                self._made_optimizer = self._make_optimizer()
        return self._made_optimizer

    @abstractmethod
    def _make_optimizer(self) -> Optimizer:
        """Over the weights as they are."""

    @abstractmethod
    def _forward_backward(self, batch: TokenBatch, loss: Loss, into: Tensor | None) -> Metrics:
        """Add the loss's gradient to those that there are; metrics of the loss and of the layout.

        Args:
            batch: This rank's shard, with places (``with_places``) where outputs are asked for.
            loss: The objective.
            into: What the loss is given is written here, each token at its place.
        """

    @abstractmethod
    def _forward(self, batch: TokenBatch, loss: Loss, into: Tensor) -> Metrics:
        """The same without gradient."""

    @abstractmethod
    def _update(self, adam: AdamStep | None) -> StepResult:
        """Clip, update the weights, clear the gradients."""

    @abstractmethod
    def _score(self, batch: TokenBatch, weights: WeightsName, keep: TokenFilter | None, into: Tensor) -> None:
        """Write the log-probs or values of the scored tokens into [N] float32 zeros, without gradient. With moments
        beside them, into [N, 3]."""

    @abstractmethod
    def _score_likeliest(self, batch: TokenBatch, k: int, ids: Tensor, logprobs: Tensor) -> None:
        """Write the likeliest tokens where one is scored into [N, K] zeros, without gradient."""

    @abstractmethod
    def _pieces_of_rank(self) -> Iterable[Piece]:
        """This rank's part of the weights that are exported."""

    @abstractmethod
    def _write_adapters(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the folder that peft loads, of whole factors under its names."""

    @abstractmethod
    def _release(self) -> None:
        """Drop the model, and leave the other ranks."""

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        self.clear_gradients()
        self._begin(batch, loss)
        found = self._forward_backward(batch, loss, None)
        return {**found, **update_metrics(self._updated(None)), **self._work.metrics(batch)}

    def forward_backward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        _ = self._optimizer  # first: passes find its state where it rests
        self._begin(batch, loss)
        self._require_whole_gradients()
        self._gathered = "part"
        into = self._room_for_outputs(batch, loss)
        found = self._forward_backward(with_places(batch), loss, into)
        self._gathered = "whole"
        return {**found, **self._work.metrics(batch)}, into.to(batch.token_ids.device)

    def forward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        self._begin(batch, loss)
        into = self._room_for_outputs(batch, loss)
        found = self._forward(with_places(batch), loss, into)
        return {**found, **self._work.metrics(batch)}, into.to(batch.token_ids.device)

    def optimizer_step(self, adam: AdamStep | None = None) -> Metrics:
        self._residency.expect("weights", "gradients", "optimizer")
        self._require_whole_gradients()
        found = update_metrics(self._updated(adam))
        self._gathered = "nothing"
        return found

    def clear_gradients(self) -> None:
        self._clear_gradients()
        self._gathered = "nothing"

    def get_logprobs(self, batch: TokenBatch, weights: WeightsName = "policy") -> Tensor:
        self._require_head("language_model", "log-probs")
        # The reference is compared with over the whole vocabulary: it was no sampler.
        keep = batch.keep.alone if batch.keep is not None and weights == "policy" else None
        return self._scores(batch, weights, keep)

    def get_moments(self, batch: TokenBatch) -> Tensor:
        self._require_head("language_model", "entropies")
        return self._scores(batch, "policy", TokenFilter(beside_moments=True))

    def get_values(self, batch: TokenBatch) -> Tensor:
        self._require_head("value", "values")
        return self._scores(batch, "policy", None)

    def get_topk_logprobs(self, batch: TokenBatch, k: int) -> tuple[Tensor, Tensor]:
        self._require_head("language_model", "log-probs")
        self._residency.require("weights")
        ids = torch.zeros((batch.num_tokens, k), dtype=torch.int64, device=self._device)
        logprobs = torch.zeros((batch.num_tokens, k), dtype=torch.float32, device=self._device)
        self._score_likeliest(batch, k, ids, logprobs)
        return ids.to(batch.token_ids.device), logprobs.to(batch.token_ids.device)

    def publish_pieces(self, transport: str, *, digests: bool = False) -> RankPieces:
        self._residency.require("weights")
        return self._sender.publish(transport, self._pieces_of_rank, digests=digests)

    def withdraw_pieces(self) -> None:
        self._sender.close()

    def export_adapters(self) -> Iterator[Mapping[str, Tensor]]:
        self._residency.require("weights")
        if self._adapters is None:
            raise UsageError(
                "this policy has no adapters: all of its weights are trained",
                fix="set policy.lora, or export the whole model",
            )
        yield from self._adapters.published()

    def save_adapters(self, path: Path) -> None:
        buckets = self.export_adapters()
        tensors = {name: tensor.contiguous().cpu() for bucket in buckets for name, tensor in bucket.items()}
        if self._rank == 0:
            self._write_adapters(path, tensors)

    def scale_rate(self, factor: float) -> None:
        self._optimizer.rate_scale *= factor

    def offload(self, parts: Sequence[MemoryPart]) -> None:
        self._residency.offload(parts, keep_gradients=self._gathered == "whole")

    def onload(self, parts: Sequence[MemoryPart]) -> None:
        self._residency.onload(parts)

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        return self._residency.held_bytes()

    def remarks(self) -> Sequence[str]:
        return self._layout.remarks

    def shutdown(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.end_writing()
        self._sender.close()
        del self._residency, self._made_optimizer, self._adapters, self._reference
        self._release()
        empty_cache()

    def _clear_gradients(self) -> None:
        self._optimizer.clear_gradients()

    def _begin(self, batch: TokenBatch, loss: Loss) -> None:
        require_fields(batch, loss)
        self._residency.expect("weights", "gradients", "optimizer")
        self._residency.rest()
        self._work.begin()

    def _updated(self, adam: AdamStep | None) -> StepResult:
        """An update, for which the optimizer's state comes in from where it may rest."""
        with self._room_for_states():
            self._residency.require("optimizer")
        result = self._update(adam)
        self._residency.rest()
        return result

    def _room_for_outputs(self, batch: TokenBatch, loss: Loss) -> Tensor:
        shape = output_shape(batch, candidates="candidate_ids" in loss.requires)
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def _require_whole_gradients(self) -> None:
        if self._gathered == "part":
            raise UsageError(
                "an earlier forward_backward failed midway: the gradient since the last update is a part of one",
                fix="call clear_gradients(), and repeat what was added since the last update",
            )

    def _scores(self, batch: TokenBatch, weights: WeightsName, keep: TokenFilter | None) -> Tensor:
        """[N] of the model's output, where ``batch`` is; [N, 3] with moments."""
        has_copy = self._reference is not None
        self._residency.require("reference" if weights == "reference" and has_copy else "weights")
        if weights == "reference" and not self._has_reference:
            raise UsageError(
                "this policy keeps no reference weights: it was built with reference=False",
                fix="build it with reference=True (a config does when its algorithm compares with the initial policy)",
            )
        columns = keep.columns if keep is not None else 1
        shape = (batch.num_tokens,) if columns == 1 else (batch.num_tokens, columns)
        found = torch.zeros(shape, dtype=torch.float32, device=self._device)
        in_force: AbstractContextManager[Any] = nullcontext()
        if weights == "reference" and self._adapters is not None:
            in_force = self._adapters.disabled()
        with in_force:
            self._score(batch, weights, keep, found)
        self._residency.rest()
        return found.to(batch.token_ids.device)

    def _require_head(self, head: Head, what: str) -> None:
        if self._head != head:
            raise UsageError(
                f"this model has no {what}: it was built with head={self._head!r}", fix=f"build it with head={head!r}"
            )

    @contextmanager
    def _room_for_microbatches(self) -> Iterator[None]:
        """Around forward and backward passes."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"out of memory on {self._device} with microbatches of {self._budget} padded tokens: {error}",
                fix=f"set policy.microbatch_tokens: {max(1, self._budget // 2)} or policy.activation_checkpointing: "
                "true",
            ) from error

    @contextmanager
    def _room_for_states(self) -> Iterator[None]:
        """Around what allocates the optimizer's state: masters when it is made, moments in its first step."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"the optimizer's state does not fit on {self._device} beside the model and its gradients: {error}",
                fix="train adapters (policy.lora), use more GPUs, or a smaller model; microbatches play no part in it",
            ) from error
