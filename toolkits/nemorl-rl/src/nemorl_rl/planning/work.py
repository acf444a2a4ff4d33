"""WorkMeter: what one rank of a training backend computed in an optimizer step, as metrics that merge over ranks.

Two accounts of the same step. *Needed*: what NeMo RL's formulas count for the sequences of the batch, every token of
them, whatever the layout; over the seconds and the device's peak it is the model FLOPs utilisation (MFU) of PaLM
(arXiv:2204.02311, appendix B). *Computed*: the matrix products that were really made, padding and recomputation
included, tokens that are left out or shared between sequences not: the hardware FLOPs utilisation, never above 1 but
for a peak that was measured on a busy machine.

# N = tokens of all sequences concatenated, R = rows, W = row width
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from nemorl.errors import UsageError
from nemorl.metrics import Mean, Metric, Sum
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import Rows
from nemorl_tensors.logprobs import KEPT_LOGITS_BYTES
from torch import Tensor

from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.device_peaks import TERA, device_peak

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts import Head

FORWARD, GRADIENTS, INPUT_GRADIENT = 1, 2, 1
"""Products of a matrix: with its input; for the gradients of both; for the input's alone where the matrix is frozen."""


@dataclass(frozen=True)
class MtpWork:
    """What MTP layers add to passes with gradients.

    >>> MtpWork(depths=3).backward_products
    3
    """

    depths: int
    trains: bool = True
    """Else they are measured: a forward pass alone"""
    is_apart: bool = True
    """The output head gets no gradient of them."""
    backward_products: ClassVar[int] = FORWARD + GRADIENTS
    """Of a layer, without recomputation"""

    def computed_flops(self, geometry: Geometry, tokens: float, scored: float, pairs: float, recomputed: bool) -> float:
        """Of a microbatch, as :meth:`Model.computed_flops` counts; logits are made twice."""
        layer, head = geometry.mtp_flops(tokens, scored, pairs)
        if not self.trains:
            return self.depths * (layer + head)
        of_head = 2 * FORWARD + (INPUT_GRADIENT if self.is_apart else GRADIENTS)
        return self.depths * (layer * (self.backward_products + recomputed) + head * of_head)


@dataclass(frozen=True)
class Model:
    """The model of a training backend, as far as its FLOPs depend on it."""

    geometry: Geometry | None
    """Unset: of an architecture that has no attention layers alone, whose FLOPs are not counted."""
    has_vocabulary_head: bool = True
    """False: a value head, one number per token."""
    is_frozen: bool = False
    """Its matrices get no gradient, those of small adapters do."""
    recomputes_layers: bool = False
    """Activation checkpointing."""
    mtp: MtpWork | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], **facts: Any) -> Model:
        """That of a ``config.json`` or of transformers' config as a mapping.

        Args:
            config: Its sizes.
            **facts: The other fields.
        """
        geometry: Geometry | None = None
        with suppress(UsageError):
            geometry = Geometry.from_config(config)
        return cls(geometry, **facts)

    @classmethod
    def trained(
        cls, config: Mapping[str, Any], policy: TrainingOptions, head: Head, mtp: MtpWork | None = None
    ) -> Model:
        """That of a policy, whose config is as :meth:`of` takes it."""
        return cls.of(
            config,
            has_vocabulary_head=head == "language_model",
            is_frozen=policy.lora is not None,
            recomputes_layers=policy.activation_checkpointing,
            mtp=mtp,
        )

    def needed_flops(self, tokens: float, squares: float) -> float:
        """Of training on whole sequences, logits of every token included, as NeMo RL counts it.

        Args:
            tokens: Of all sequences.
            squares: Sum of their squared lengths.
        """
        assert self.geometry is not None, "the caller checks"
        return self.geometry.training_flops(tokens, tokens if self.has_vocabulary_head else 0.0, squares)

    def computed_flops(self, tokens: float, scored: float, pairs: float, *, backward: bool, kept: float = 0.0) -> float:
        """Of a microbatch as it was computed.

        Args:
            tokens: Through the layers, padding included.
            scored: Positions whose logits were computed.
            pairs: (query, key) pairs of causal attention.
            backward: Gradients were computed too. Then the head's logits are made twice, once per direction, where
                they are not kept: 8 FLOPs per element and position in place of 6.
            kept: Scored positions whose logits were kept.
        """
        geometry = self.geometry
        assert geometry is not None, "the caller checks"
        matrices = 2.0 * geometry.active_parameters * tokens
        attention = geometry.attention_flops(tokens, pairs)
        head = 2.0 * geometry.embedding_parameters * self.has_vocabulary_head
        if not backward:
            return matrices + attention + head * scored
        gradients = INPUT_GRADIENT if self.is_frozen else GRADIENTS
        layer_passes = FORWARD * (1 + self.recomputes_layers)
        ahead = 0.0
        if self.mtp is not None:
            ahead = self.mtp.computed_flops(geometry, tokens, scored, pairs, self.recomputes_layers)
        return ahead + (
            matrices * (layer_passes + gradients)
            + attention * (layer_passes + GRADIENTS)
            + head * (scored * (2 * FORWARD + gradients) - kept * FORWARD)
        )


@dataclass
class _Count:
    """Microbatches that were computed alike: with a backward pass, or without."""

    tokens: int = 0
    padding: int = 0
    scored: int = 0
    kept: int = 0
    pairs: float | Tensor = 0.0
    """A tensor where it takes one to know, read once per step: reading it at once would stall a GPU."""


@dataclass
class WorkMeter:
    """Counts a rank's microbatches, step by step, and turns them into metrics.

    Example:
        >>> meter = WorkMeter.on(Model(None), "cpu", torch.float32)
        >>> meter.begin()
        >>> batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
        >>> meter.metrics(batch)["performance/computed_tokens"].value
        0.0
    """

    model: Model
    peak: float
    """FLOP/s of one device."""
    ranks_per_copy: int = 1
    """Ranks that hold one copy of the model together and report as one."""
    logit_bytes: int = 0
    """Of one logit, where a microbatch's are kept for the backward pass if they fit; 0: they never are."""
    largest: Callable[[int], int] = int
    """The maximum of a number over all ranks; a collective where there are several."""
    clock: Callable[[], float] = time.perf_counter
    _started_s: float = 0.0
    _counts: dict[bool, _Count] = field(default_factory=dict)

    @classmethod
    def on(cls, model: Model, device: str, kind: torch.dtype, **facts: Any) -> WorkMeter:
        """The meter of a rank on a device. The device's peak is looked up, or measured, once per process.

        Args:
            model: What is trained.
            device: torch device string.
            kind: Number format of its matrix products.
            **facts: The other fields.
        """
        return cls(model, device_peak(device, kind), **facts)

    def begin(self) -> None:
        """An optimizer step begins."""
        self._counts = {True: _Count(), False: _Count()}
        self._started_s = self.clock()

    def add(self, rows: Rows, *, backward: bool, parts: int = 1) -> None:
        """A microbatch goes through the model.

        Args:
            rows: As the model is given them.
            backward: Forward and backward, not forward alone.
            parts: Ranks that share the tokens of these rows equally (context parallelism); the rows are one's part.
        """
        height, width = rows.input_ids.shape
        count = self._counts[backward]
        tokens = height * width * parts
        count.tokens += tokens
        count.padding += tokens - rows.real_tokens
        scored = rows.targets.numel() * parts
        count.scored += scored
        count.kept += scored if self._keeps_logits(scored) else 0
        if rows.position_ids is None:
            count.pairs = count.pairs + tokens * (width * parts + 1) / 2
        else:  # a token sees those before it in its sequence, wherever they stand, and itself
            count.pairs = count.pairs + (rows.position_ids + 1).sum() * parts

    def metrics(self, batch: TokenBatch) -> dict[str, Metric]:
        """Of the step that ``begin`` began and that ends now. Collective where there are several ranks.

        Args:
            batch: This rank's shard of it.
        """
        seconds = (self.clock() - self._started_s) * self.ranks_per_copy
        tokens = sum(count.tokens for count in self._counts.values())
        most = self.largest(tokens)
        found: dict[str, Metric] = {
            "computed_tokens": Sum(float(tokens)),
            "padding_frac": Mean(sum(count.padding for count in self._counts.values()), tokens),
            "rank_wait_frac": Mean(most - tokens, most),
        }
        if self.model.geometry is not None:
            needed = self.model.needed_flops(batch.num_tokens, float(batch.lengths.double().square().sum()))
            computed = sum(
                self.model.computed_flops(
                    count.tokens, count.scored, float(count.pairs), backward=backward, kept=count.kept
                )
                for backward, count in self._counts.items()
            )
            found |= {
                "train_flops_per_gpu": Mean(needed / TERA, seconds),
                "train_fp_utilization": Mean(needed, seconds * self.peak),
                "computed_flops_per_gpu": Mean(computed / TERA, seconds),
                "computed_fp_utilization": Mean(computed, seconds * self.peak),
            }
        return {f"performance/{name}": metric for name, metric in found.items()}

    def _keeps_logits(self, positions: int) -> bool:
        vocabulary = self.model.geometry.vocabulary if self.model.geometry is not None else 0
        return 0 < positions * vocabulary * self.logit_bytes <= KEPT_LOGITS_BYTES
