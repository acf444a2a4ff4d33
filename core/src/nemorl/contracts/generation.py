"""The contract of generation backends: the core protocol, and a protocol for each capability that has methods.

What capabilities are says :mod:`nemorl.contracts.training`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from nemorl.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from nemorl_tensors.engines.observing import Activations

    from nemorl.metrics import Metric
    from nemorl.weights import Digest, WeightHandle

GenerationCapability = Literal[
    "activations",  # ObservableSampler
    "adapter_snapshots",  # several versions of adapters at a time
    "adapters",  # takes LoRA apart from the model
    "any_transport",  # fetches weights over whatever transport a run names
    "constrained",  # SamplingParams.json_schema
    "filtered_logprobs",  # log-probs among the tokens that the sampler left
    "generation_metrics",  # ReportingSampler
    "in_flight_updates",  # update_weights while requests run
    "media",  # GenerationRequest.media: images or sounds in prompts, where the model sees or hears
    "prompt_logprobs",  # SamplingParams.prompt_logprobs
    "receipts",  # ProvingBackend
    "remarks",  # RemarkingBackend
    "routes",  # SamplingParams.routes
    "several_nodes",  # one engine over whole nodes (WorkerContext.further_nodes)
    "shared_weights",  # samples from the trainer's own tensors
    "sleep",  # SleepingBackend: leaves the device's memory and comes back
    "snapshots",  # several versions of the weights at a time
    "submit",  # RequestBackend: single requests, at any time
    "weight_pieces",  # reads the parts that ranks send
]
"""Of a generation backend.

>>> able: frozenset[GenerationCapability] = frozenset({"sleep", "submit"})
"""


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


@runtime_checkable
class RequestBackend(GenerationBackend, Protocol):
    """An engine that takes requests while others run (capability ``submit``); ``generate`` submits and waits.

    ``update_weights`` does not wait for running requests: each goes on, and every token after the update is drawn from
    the new weights alone, of which the completion says the first (``version_starts``). ``sleep`` is refused meanwhile.

    >>> future = engine.submit(GenerationRequest((5, 6), SamplingParams()))  # doctest: +SKIP
    >>> [one] = future.result()  # doctest: +SKIP
    """

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        """Begin a request and return at once, from any thread. It joins those that run and changes none of them.

        The future is given one completion per seed, or the error of this request alone. ``future.cancel()`` succeeds
        until then, and frees what the request holds before the engine's next step.
        """
        ...


class ProvingBackend(Protocol):
    """A generation backend with the capability ``receipts``.

    >>> engine.held_digests(["model.norm.weight"])  # doctest: +SKIP
    {'model.norm.weight': Digest('bfloat16', (576,), 5188146770730811392)}
    """

    def held_digests(self, names: Collection[str]) -> Mapping[str, Digest | str]:
        """Digests of the weights that it holds, computed from its own memory by the inverse of its layout.

        It is asked after an update whose handle has ``digests``, which it may not read for its answer. A tensor that it
        holds in another form (rounded, packed for a kernel) has in place of a digest the reason why there is none; one
        that it does not hold is left out.

        Args:
            names: As the tensors were sent.
        """
        ...


class ReportingSampler(Protocol):
    """A generation backend with the capability ``generation_metrics``.

    >>> engine.take_metrics()  # doctest: +SKIP
    {'generation_preemptions': Sum(2.0)}
    """

    def take_metrics(self) -> dict[str, Metric]:
        """Metrics of its work since it was last asked; logged with each step as ``train/…``."""
        ...


class ObservableSampler(Protocol):
    """A generation backend with the capability ``activations``.

    >>> completion, activations = engine.observe(request)  # doctest: +SKIP
    """

    def observe(self, request: GenerationRequest) -> tuple[Completion, Activations]:
        """A response to a request of one seed, and what the model computed for all tokens but the last while it was
        generated: the prompt at once, then token by token.

        Raises:
            BackendError: The pieces of this model are not known, it is spread over devices, or it is compiled.
        """
        ...


class HoldsVersions(Protocol):
    """Options of a generation backend with the capability ``snapshots`` or ``adapter_snapshots``.

    >>> backend.snapshots  # doctest: +SKIP
    3
    """

    @property
    def snapshots(self) -> int:
        """Most versions of the weights that an engine holds."""
        ...
