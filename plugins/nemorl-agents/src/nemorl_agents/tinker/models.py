"""Models: what a Tinker server trains and samples with, and the plain data that it passes to them.

# n = tokens of one datum, K = target tokens at each position of it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from nemorl.contracts import AdamStep, Loss
    from torch import Tensor

StopReason = Literal["stop", "length"]
Topk = list[tuple[int, float]]
"""The likeliest tokens at one position and their log-probs in nats, likeliest first."""


@dataclass(frozen=True)
class ModelSettings:
    """The base model that is to be trained on and sampled from."""

    model: str
    """Folder or hub name."""
    name: str
    """As clients ask for it; they load their tokenizer by it."""
    max_sequence_tokens: int
    largest_rank: int
    """Of adapters. All take the memory of this rank while they are trained."""
    precision: str
    """Of the base's weights."""
    generation: Mapping[str, object]
    """Fields of ``GenerationConfig``."""


@dataclass(frozen=True)
class Base:
    """A model that adapters are trained on and that is sampled from."""

    name: str
    """As clients name it, e.g. ``Qwen/Qwen3-8B``; they load their tokenizer by it unless ``tokenizer`` is set."""
    max_context_tokens: int
    trainable: bool = True
    sampleable: bool = True
    tokenizer: str | None = None
    """Hub name or folder of its tokenizer, as clients can load it. Unset: ``name``."""


@dataclass(frozen=True)
class NewModel:
    """An adapter that is to be made."""

    base_model: str
    rank: int
    seed: int
    """Of the initial weights: two adapters of equal fields are equal."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class Datum:
    """One sequence, and the loss's inputs at each of its positions."""

    token_ids: tuple[int, ...]
    """[n] what the model reads: position i predicts ``fields["target_tokens"][i]``."""
    fields: Mapping[str, Tensor]
    """By the client's names: [n] or [n, K], int64 or float32."""


@dataclass(frozen=True)
class Passed:
    """The outcome of a forward pass."""

    logprobs: Sequence[Tensor]
    """One per datum, [n] or [n, K] float32 nats: of its target tokens, also where their weight is 0."""
    metrics: Mapping[str, float]
    """Named ``name:reduction``; ``loss:sum`` is there. Reductions are mean, sum, min, max, slack, hash2 and unique."""


@dataclass(frozen=True)
class SampleRequest:
    """Continuations of one prompt."""

    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    """The samples of a request differ by their number, and equal requests give equal samples."""
    num_samples: int = 1
    stop: tuple[int, ...] | tuple[str, ...] | None = None
    """Tokens or texts that end a sample. None: the model's own end tokens; empty: nothing ends it but its length."""
    temperature: float = 1.0
    """0: the likeliest token."""
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


@dataclass(frozen=True)
class SampledSequence:
    """One continuation."""

    token_ids: Sequence[int]
    """With the token that ended it."""
    logprobs: Sequence[float]
    """Of the distribution it was drawn from, at its temperature, before ``top_k`` and ``top_p``."""
    stop_reason: StopReason
    topk: Sequence[Topk] | None = None


@dataclass(frozen=True)
class Sampled:
    """The answer to one ``SampleRequest``."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float] | None = None
    """One per prompt token at temperature 1, NaN for the first."""
    topk_prompt: Sequence[Topk | None] | None = None
    """One per prompt token, None for the first."""
    prompt_cache_hit_tokens: int = 0


RUNS = "runs"
"""In a server's folder: the loops of its clients, as runs of nemorl."""
STATE = "state"
"""In a folder that ``Models.save`` wrote: what training goes on from, as training backends save it."""


class Models(Protocol):
    """Adapters on base models. One thread calls it, one call at a time; where ``samples_apart`` is set, a second one
    calls ``sample`` meanwhile.

    A call that raises leaves the model as it was: what a ``forward_backward`` that failed had added is taken away. An
    error of nemorl's ``UsageError`` family is the client's fault; anything else is the server's.

    A restarted server rebuilds a model by ``create``, ``load`` and the same calls again: results are equal bit for bit
    as far as these are deterministic.
    """

    @property
    def bases(self) -> Sequence[Base]:
        """What clients can ask for."""
        ...

    @property
    def samples_apart(self) -> bool:
        """Samples need nothing of what trains: both go on at the same time."""
        ...

    def create(self, model_id: str, new: NewModel) -> None:
        """Make an adapter, without gradient and with a fresh optimizer."""
        ...

    def forward(self, model_id: str, data: Sequence[Datum], loss: Loss) -> Passed:
        """Log-probs and loss, without gradient."""
        ...

    def forward_backward(self, model_id: str, data: Sequence[Datum], loss: Loss) -> Passed:
        """The same, and its gradient is added to that of earlier calls since the last step."""
        ...

    def step(self, model_id: str, adam: AdamStep) -> dict[str, float]:
        """One optimizer step with the gradient, which is zero afterwards; returns metrics of it."""
        ...

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Write weights, and the optimizer's state where asked, into a folder that is not there yet."""
        ...

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Take over what ``save`` wrote. The gradient is zero afterwards; so is the optimizer's state unless loaded."""
        ...

    def snapshot(self, model_id: str, folder: Path) -> None:
        """Write the weights as files of PEFT into a folder that is not there yet, to sample from and to give away."""
        ...

    def sample(self, base: str, snapshot: Path | None, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Answers in order. ``snapshot``: a folder that ``snapshot`` wrote; None: the base itself."""
        ...

    def free(self, model_id: str) -> None:
        """Forget an adapter; one that is not there is fine."""
        ...
