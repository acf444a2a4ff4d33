"""The contract of training backends: losses, the core protocol, and a protocol for each capability that has methods.

A capability is what a backend can do beyond the core, declared on its config class (``supports``). Capabilities are
compared when a config loads, so that what a run needs and a backend lacks is an error before anything starts; those
without a protocol promise that an option works. ``nemorl plugins check`` tests each that is declared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch
    from nemorl_tensors.engines.observing import Activations
    from nemorl_tensors.engines.pieces import RankPieces
    from torch import Tensor

    from nemorl.metrics import Metrics

WeightsName = Literal["policy", "reference"]
"""The weights that log-probs are asked of: the current ones or the frozen initial ones.

>>> backend.get_logprobs(batch, "reference")  # doctest: +SKIP
"""
Head = Literal["language_model", "value"]
"""The output of a model at each token: log-probs of the vocabulary, or one number (critics, reward models).

>>> critic: Head = "value"
"""
TrainingCapability = Literal[
    "activation_checkpointing",  # policy.activation_checkpointing
    "activations",  # ObservableTrainer: what each layer says
    "adapted_head",  # policy.lora.head
    "adapters",  # AdapterBackend: LoRA apart from the model
    "asynchronous_checkpoint",  # SnapshottingBackend: a checkpoint is written while training goes on
    "filtered_logprobs",  # log-probs among the tokens that the sampler left
    "halved_steps",  # HalvedSteps: gradients of several calls, then one update
    "lora",  # policy.lora
    "moments",  # MomentsBackend: entropies of the distribution, and losses that read them
    "muon",  # policy.optimizer.name
    "nf4",  # policy.lora.base: a base in 4 bits
    "offload",  # OffloadingBackend: leaves the device's memory and comes back
    "packing",  # several sequences in a row
    "rate_scale",  # RateScalingBackend: learns more slowly from now on
    "reference",  # get_logprobs(batch, "reference")
    "remarks",  # RemarkingBackend
    "routes",  # policy.backend.router.replay: tokens go to the experts that the field ``routes`` names
    "shared_base",  # SharedBase: several adapters with an optimizer each
    "shared_prefixes",  # sequences that begin alike are computed once
    "tensor_parallel_lora",  # LoRA under tensor parallelism
    "topk_logprobs",  # get_topk_logprobs
    "value_head",  # get_values
    "weight_pieces",  # PublishesPieces: each rank sends its part
    "weights_only_checkpoint",  # save_checkpoint(optimizer=False)
]
"""Of a training backend.

>>> able: frozenset[TrainingCapability] = frozenset({"lora", "offload"})
"""


class Loss(Protocol):
    """A scalar objective over what a model says. Implementations are frozen dataclasses: picklable, compared by value.

    A loss sums ``per_token * batch.loss_weights`` and nothing else normalises, so that microbatches add up. One that
    compares sequences with each other is given a batch whose ``sequences_per_group`` says how many belong together.

    >>> class Imitation:
    ...     requires = frozenset()
    ...     def __call__(self, logprobs, batch):
    ...         return -(torch.where(batch.mask, logprobs, 0.0) * batch.loss_weights).sum(), {}
    """

    @property
    def requires(self) -> frozenset[str]:
        """Batch fields it reads, e.g. ``{"advantages", "old_logprobs"}``; checked before the forward pass. A loss that
        reads ``candidate_ids`` [N, K] is given the log-probs of these, [N, K], in place of those of the tokens."""
        ...

    def __call__(self, outputs: Tensor, batch: TokenBatch, /) -> tuple[Tensor, Metrics]:
        """([N] float32 log-probs, or values under a value head, with gradient; their batch) -> (scalar, metrics)."""
        ...


@runtime_checkable
class SelectiveLoss(Protocol):
    """A loss that says which sequences give a gradient. Without this method, all get a backward pass.

    Example:
        >>> class Reinforce:
        ...     requires = frozenset({"advantages"})
        ...     def __call__(self, logprobs, batch):
        ...         per_token = torch.where(batch.mask, -batch["advantages"] * logprobs, 0.0)
        ...         return (per_token * batch.loss_weights).sum(), {}
        ...     def has_gradient(self, batch):
        ...         return segment_sum((batch["advantages"] != 0).float(), batch.mask, batch.lengths) > 0
        >>> isinstance(Reinforce(), SelectiveLoss)
        True
    """

    def has_gradient(self, batch: TokenBatch, /) -> Tensor:
        """[B] bool, False where the loss's derivative by every output of the sequence is exactly 0, whatever the model
        says and whatever other sequences are beside it."""
        ...


@runtime_checkable
class TrainingBackend(Protocol):
    """One rank of a policy that learns. All ranks run the same calls (SPMD).

    >>> metrics = backend.train_step(batch, loss)  # doctest: +SKIP
    """

    def train_step(self, batch: TokenBatch, loss: Loss) -> Metrics:
        """One optimizer step over one minibatch (this rank's shard of it).

        Returns the loss's metrics plus ``loss`` (Sum), ``grad_norm`` (before clipping) and ``lr``. A non-finite
        gradient norm skips the update and counts in ``skipped_updates``.
        """
        ...

    def get_logprobs(self, batch: TokenBatch, weights: WeightsName = "policy") -> Tensor:
        """[N] float32 nats at ``batch.temperature``, without gradient; 0.0 where ``batch.mask`` is False."""
        ...

    def get_values(self, batch: TokenBatch) -> Tensor:
        """[N] float32 without gradient, 0.0 where ``batch.mask`` is False: index t values the state before token t.

        Of models with a value head (capability ``value_head``); others refuse.
        """
        ...

    def get_topk_logprobs(self, batch: TokenBatch, k: int) -> tuple[Tensor, Tensor]:
        """[N, K] int64 ids of the k likeliest tokens, most likely first, and their [N, K] float32 log-probs.

        At ``batch.temperature``, over the whole vocabulary, without gradient; zeros where ``batch.mask`` is False.
        Capability ``topk_logprobs``.
        """
        ...

    def export_weights(self) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of tensors under their Hugging Face names: the policy as a plain model, adapters merged.

        All ranks iterate together. Whole tensors are yielded on rank 0; what other ranks yield is not read.
        Where possible these are the live parameters (no copy): read them before the next ``train_step``.
        """
        ...

    def save_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        """Write weights, optimizer, scheduler and RNG state into the existing folder ``path`` (safetensors, JSON).

        Without ``optimizer`` its state is left out: what is loaded then has a new one, at the same step. Capability
        ``weights_only_checkpoint``.
        """
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Continue exactly where ``save_checkpoint`` left off: bit for bit on CPU."""
        ...

    def save_pretrained(self, path: Path) -> None:
        """Write the policy as a Hugging Face model folder (config, safetensors, tokenizer)."""
        ...

    def shutdown(self) -> None:
        """Release memory and process groups. Calling it twice is harmless."""
        ...


class RemarkingBackend(Protocol):
    """A training backend that says how it was built (capability ``remarks``): events of the run, not warnings.

    >>> backend.remarks()  # doctest: +SKIP
    ('each sequence has a padded row of its own: …',)
    """

    def remarks(self) -> Sequence[str]:
        """Departures from its defaults, each with the reason."""
        ...


class AdapterBackend(Protocol):
    """A training backend whose adapters can be read apart from the model (capability ``adapters``).

    Example:
        >>> names = [name for bucket in backend.export_adapters() for name in bucket]  # doctest: +SKIP
    """

    def export_adapters(self) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of the adapters' tensors, as ``export_weights`` yields those of the whole model.

        Names are those of peft's files: ``base_model.model.<module>.lora_A.weight`` [R, I] and ``…lora_B.weight``
        [O, R], for a rank R and a linear layer of I inputs and O outputs.
        """
        ...

    def save_adapters(self, path: Path) -> None:
        """Write the folder that ``peft.PeftModel.from_pretrained`` loads: ``adapter_config.json`` and
        ``adapter_model.safetensors``."""
        ...


AdaptedModules = Literal["attention", "mlp", "head"]
"""Layers of a model: those that mix tokens, those that do not, and the output head.

>>> every: frozenset[AdaptedModules] = frozenset({"attention", "mlp", "head"})
"""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """One of several adapters on a base: what it is made of.

    >>> backend.add_adapter("mine", AdapterShape(rank=8, seed=1))  # doctest: +SKIP
    """

    rank: int
    """At most that of ``policy.lora``"""
    alpha: float = 32.0
    """Its scale is alpha / rank"""
    seed: int = 42
    """Of what is drawn"""
    modules: frozenset[AdaptedModules] = frozenset({"attention", "mlp"})
    """Among those that ``policy.lora`` adapts"""


class SharedBase(Protocol):
    """A training backend that trains several adapters on one base (capability ``shared_base``).

    Each has an optimizer, a position in the schedule, gradients since its last update and random generators of its own:
    what becomes of one does not depend on others. All other verbs are about the one in use: at first that of
    ``policy.lora``, named ``policy``.

    >>> backend.add_adapter("mine", AdapterShape(rank=8)); backend.use_adapter("mine")  # doctest: +SKIP
    """

    def add_adapter(self, name: str, shape: AdapterShape) -> None:
        """Draw a new one. It says what the base says, until it has been trained."""
        ...

    def use_adapter(self, name: str) -> None:
        """Put it in place of the one in use."""
        ...

    def load_adapter(self, path: Path) -> None:
        """Take the factors that ``save_adapters`` wrote into the one in use, whose optimizer begins anew."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Forget it; in place of the one in use comes ``policy``."""
        ...


@runtime_checkable
class RateScalingBackend(Protocol):
    """A training backend whose learning rate can be scaled while it trains (capability ``rate_scale``).

    The scale is a part of its checkpoints. An alert with the action ``lower_rate`` uses it.

    >>> backend.scale_rate(0.5)  # doctest: +SKIP
    """

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rate of all later steps, over what the schedule says and over earlier factors."""
        ...


@dataclass(frozen=True, slots=True)
class AdamStep:
    """AdamW (arXiv:1711.05101) of one optimizer step, in place of what the config and its schedule say.

    >>> backend.optimizer_step(AdamStep(lr=1e-4, max_grad_norm=1.0))  # doctest: +SKIP
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled. Of matrices: biases and norms do not decay"""
    max_grad_norm: float | None = None
    """The global norm of all gradients added up is clipped to this. Unset: it is not"""


class HalvedSteps(Protocol):
    """A training backend whose ``train_step`` is available in its two halves (capability ``halved_steps``).

    ``train_step`` is ``clear_gradients``, ``forward_backward`` and ``optimizer_step``, and gives the same numbers.

    >>> for part in batches: backend.forward_backward(part, loss)  # doctest: +SKIP
    >>> backend.optimizer_step()  # doctest: +SKIP
    """

    def forward_backward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        """Add the loss's gradient to those of earlier calls since the last update.

        Returns the loss's metrics with ``loss``, and what the loss was given at each token, [N] or [N, K] float32, of
        this same pass. After a call that failed midway nothing is added or updated until ``clear_gradients``.
        """
        ...

    def forward(self, batch: TokenBatch, loss: Loss) -> tuple[Metrics, Tensor]:
        """The same without a gradient and without dropout."""
        ...

    def optimizer_step(self, adam: AdamStep | None = None) -> Metrics:
        """Update the weights by all gradients since the last update, and clear these; as the config says, or ``adam``.

        Returns ``grad_norm``, ``lr`` and ``skipped_updates``, as ``train_step`` does.
        """
        ...

    def clear_gradients(self) -> None:
        """Forget what was added since the last update."""
        ...


@runtime_checkable
class SnapshottingBackend(Protocol):
    """A training backend that writes checkpoints while it trains (capability ``asynchronous_checkpoint``).

    >>> backend.snapshot_checkpoint(folder); backend.train_step(batch, loss)  # doctest: +SKIP
    >>> sorted(backend.snapshot_files(wait=True))  # doctest: +SKIP
    ['policy/model.safetensors', …]
    """

    def snapshot_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        """``save_checkpoint`` of the state as it is now. It returns when that is copied: training may go on, while a
        thread of this rank writes the copy. One at a time."""
        ...

    def snapshot_files(self, *, wait: bool) -> Mapping[str, str] | None:
        """The files of this rank's last snapshot, flushed to disk, each path with the SHA-256 of its content; ``None``
        while it is being written, unless asked to wait. Raises what kept it from being written."""
        ...


@runtime_checkable
class MomentsBackend(Protocol):
    """A training backend that knows the whole distribution at each token (capability ``moments``).

    It gives a loss the same, with gradient, where ``batch.keep.beside_moments`` asks for it.

    >>> logprobs, entropies, collisions = backend.get_moments(batch).unbind(-1)  # doctest: +SKIP
    """

    def get_moments(self, batch: TokenBatch) -> Tensor:
        """[N, 3] float32 without gradient: log-probs, entropies in nats, and sums of squared probabilities.

        Of the policy, at ``batch.temperature`` and over the whole vocabulary; zeros where ``batch.mask`` is False.
        """
        ...


class ObservableTrainer(Protocol):
    """A training backend with the capability ``activations``.

    >>> activations = backend.observe([5, 6, 7])  # doctest: +SKIP
    """

    def observe(self, token_ids: Sequence[int]) -> Activations:
        """Activations of the policy for all tokens of a sequence but the last, by the forward pass that it trains with.

        Raises:
            BackendError: The pieces of this model are not known, or it is spread over ranks.
        """
        ...


@runtime_checkable
class PublishesPieces(Protocol):
    """A training backend whose ranks send their own parts of the weights (capability ``weight_pieces``).

    >>> pieces = backend.publish_pieces("shared_memory")  # doctest: +SKIP
    """

    def publish_pieces(self, transport: str, *, digests: bool = False) -> RankPieces:
        """Make this rank's part available. All ranks call it; their pieces together are what ``export_weights`` yields,
        every element once.

        Args:
            transport: Id of one that receivers map (``WeightTransportConfig.is_mapped``).
            digests: Digest the part as well, for a receipt. Not passed where none is asked for.
        """
        ...

    def withdraw_pieces(self) -> None:
        """Release what was published: everyone has read it."""
        ...
