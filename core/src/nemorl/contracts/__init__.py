"""The contracts between the kernel and its plugins: few verbs over plain data.

No Ray handle, process group or tokenizer object appears in a signature, and an object that exists is ready: there
is no ``setup()`` to forget. ``nemorl_testing`` holds a conformance check for every clause stated here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from nemorl.types import Completion, GenerationRequest, Prompt, Row, Score, Step

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch
    from torch import Tensor

    from nemorl.metrics import Metrics
    from nemorl.plugins.kinds import DatasetConfig
    from nemorl.weights import Export, Form, WeightHandle

WeightsName = Literal["policy", "reference"]
"""The weights that log-probs are asked of: the current ones or the frozen initial ones.

>>> backend.get_logprobs(batch, "reference")  # doctest: +SKIP
"""
Head = Literal["language_model", "value"]
"""The output of a model at each token: log-probs of the vocabulary, or one number (critics, reward models).

>>> critic: Head = "value"
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
        """What it does otherwise than its defaults would, and why."""
        ...


@runtime_checkable
class GenerationBackend(Protocol):
    """An engine that continues token sequences.

    >>> [[one]] = engine.generate([GenerationRequest((5, 6), SamplingParams())])  # doctest: +SKIP
    """

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed. Token ids in, token ids and log-probs out."""
        ...

    def update_weights(self, handle: WeightHandle, version: int) -> int | None:
        """Generate from these weights from now on, without caches of older ones. Returns the bytes read, if counted."""
        ...

    def shutdown(self) -> None:
        """Release memory and processes. Calling it twice is harmless."""
        ...


class Episode(Protocol):
    """One conversation with an environment, single use.

    >>> class Echo:
    ...     def step(self, response): return Step(Score(0.0), observation=response, done=False)
    """

    def step(self, response: str) -> Step | Awaitable[Step]:
        """The environment's answer to the policy's latest response."""
        ...


class Environment(Protocol):
    """Scores responses. ``score`` for one turn; ``start`` for many. Each may be sync or async.

    >>> nemorl.RewardFunction(lambda prompt, response: 1.0).score(Prompt(0, "1+1=", ()), "2")
    1.0
    """

    def score(self, prompt: Prompt, response: str) -> float | Score | Awaitable[float | Score]:
        """The reward of one response: finite, and the same for the same prompt and response."""
        ...

    def start(self, prompt: Prompt) -> Episode:
        """A fresh conversation; many run at the same time."""
        ...

    def close(self) -> None:
        """Release what it holds. Calling it twice, or unused, is harmless."""
        ...


@runtime_checkable
class DataModule(Protocol):
    """An endless, resumable stream of batches of rows.

    >>> isinstance(RowDataModule([{"prompt": "1+1="}], batch_size=1, seed=0), DataModule)
    True
    """

    def next_batch(self) -> list[Row]: ...

    @property
    def epoch(self) -> int:
        """Passes over the data completed before the next batch begins."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable position. Loading it makes ``next_batch`` continue exactly there."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class SizedDataModule(DataModule, Protocol):
    """One whose length is known, so that a run may be given in epochs.

    >>> isinstance(RowDataModule([{"prompt": "1+1="}], batch_size=1, seed=0), SizedDataModule)
    True
    """

    def steps(self, epochs: int) -> int:
        """Batches in this many passes, at least one."""
        ...


@runtime_checkable
class Table(Protocol):
    """Rows by number: a list of mappings, a ``datasets.Dataset``, or any other random access to rows.

    >>> isinstance([{"prompt": "1+1="}], Table)
    True
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@runtime_checkable
class Fingerprinted(Protocol):
    """Rows, a ``DataModule`` or held-out rows that are known again when a run is continued.

    >>> class Squares:
    ...     def fingerprint(self): return "the squares up to 100"
    >>> isinstance(Squares(), Fingerprinted)
    True
    """

    def fingerprint(self) -> str:
        """Text that is another when the rows are. A run that has begun with one is not continued with another."""
        ...


class HeldOut(Protocol):
    """Held-out rows, in one set or several by name.

    >>> HeldOutRows({"": [{"prompt": "1+1="}]}).measure(lambda rows: {"rows": 1.0 * len(rows)}, max_rows=256)
    {'rows': 1.0}
    """

    def read(self, max_rows: int) -> Mapping[str, Sequence[Row]]:
        """The first rows of each set; the only one is called ``""``."""

    def measure(self, validate: Callable[[Sequence[Row]], Mapping[str, float]], max_rows: int) -> dict[str, float]:
        """Metrics of each set's first rows, as ``set/metric`` where there are several, and those of all together."""


DataSource: TypeAlias = "str | Path | Mapping[str, Any] | Table | DatasetConfig | DataModule"
"""What may be given as data:

- the name of an installed dataset, a file, a folder of files or a dataset of the Hugging Face hub (``org/name``);
- a mapping ``{"name": …, …options}`` as in configs;
- rows: a list of mappings, a ``datasets.Dataset``, or both splits as ``{"train": rows, "validation": rows}``;
- a dataset config, or a ready ``DataModule``.
"""


class Logger(Protocol):
    """A sink for metrics, already reduced to numbers.

    >>> class Printed:
    ...     def log(self, metrics, step): print(step, dict(metrics))
    ...     def close(self): pass
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers of a step, by full name. Several calls may belong to one step, and a resumed run repeats steps."""
        ...

    def close(self) -> None:
        """Write what is still to be written. Calling it twice, or unused, is harmless."""
        ...


class WeightTransport(Protocol):
    """Carries weights from the trainer's process to the generator's.

    >>> payload = transport("in_process").publish(lambda: iter([{"head.weight": 1.0}]))
    >>> list(transport("in_process").fetch(payload))
    [{'head.weight': 1.0}]
    """

    def publish(self, export: Export) -> Any:
        """Trainer's side: make what ``export`` yields available; returns a picklable payload that tells where.

        What the version before this one published stays valid: a generator may still be reading it.
        """
        ...

    def fetch(self, payload: Any) -> Iterator[Mapping[str, Tensor]]:
        """Generator's side: the buckets, in any cut. Tensors may be views of the sender's memory."""
        ...

    def close(self) -> None:
        """Release what ``publish`` holds."""
        ...


class WorkerGroup(Protocol):
    """The ranks of one backend, wherever they run.

    >>> losses = group.scatter("train_step", [(shard, loss) for shard in shards])  # doctest: +SKIP
    """

    @property
    def data_parallel_size(self) -> int: ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call on all ranks; results in rank order."""
        ...

    def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call with ``shards[i]`` as arguments on data-parallel rank i; one result per shard."""
        ...

    def submit(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """Call on one of several independent replicas and return at once, from any thread.

        The future has the result (of a method that returns a future: its result), or why there is none.
        """
        ...

    def publish(self, transport: str, version: int, form: Form = "model") -> WeightHandle:
        """The weights that the ranks hold together, made available over a transport."""
        ...

    def shutdown(self) -> None: ...
