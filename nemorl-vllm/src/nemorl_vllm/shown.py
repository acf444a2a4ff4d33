"""Requests with images or sounds: which of them an engine takes, and what it is given of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError
from nemorl.media import is_media
from nemorl_media.places import Placed, as_words, named_in, placed
from nemorl_media.slots import family_of
from nemorl_tensors.engines.model_config import name_or_path

from nemorl_vllm.architectures import CAUSAL, USE_HF
from nemorl_vllm.processed import engine_arguments, engine_input

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.types import GenerationRequest
    from nemorl_media.family import Family


class Shown:
    """What a model may be shown. Any thread may use it."""

    def __init__(self, policy: PolicyConfig, config: Any) -> None:
        """
        Args:
            policy: The model, and settings of its processor.
            config: The model's transformers config.
        """
        self.family: Family | None = family_of(config, name_or_path(policy), policy.media.processor)
        self._kind = str(config.model_type)
        self._lock = threading.Lock()
        """A family keeps what it has processed, for one thread at a time."""
        self._waiting: dict[int, tuple[GenerationRequest, Sequence[Placed]]] = {}
        """Requests that nobody has taken yet, by identity, and their items."""

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Those of an engine of this model, beside what engines of text have."""
        return {} if self.family is None else engine_arguments(self.family.placeholders)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that would stand for an item if they were read: a response that says one ends with it."""
        return frozenset() if self.family is None else frozenset(self.family.stand_ins.values())

    def words(self, request: GenerationRequest) -> tuple[int, ...]:
        """The prompt in the vocabulary of the model.

        Raises:
            BackendError: It shows items that do not come with it, or that the model or vLLM cannot be shown.
        """
        if self.family is None or not any(map(is_media, request.token_ids)):
            return request.token_ids
        items = named_in(request.token_ids, request.media)
        unknown = sorted({item.kind for item in items.values()} - self.family.placeholders.keys())
        if unknown:
            raise BackendError(
                f"the prompt shows {' and '.join(unknown)}, of which the model knows nothing", fix="leave such rows out"
            )
        if self._kind in CAUSAL:
            raise BackendError(f"the prompt shows an image to {self._kind}: {CAUSAL[self._kind]}", fix=USE_HF)
        return as_words(request.token_ids, items, self.family.stand_ins)

    def process(self, request: GenerationRequest) -> Sequence[Placed]:
        """The items of a prompt that ``words`` has accepted, processed; from memory where they were lately.

        Raises:
            BackendError: One is not whole.
            DataError: One cannot be decoded.
        """
        if self.family is None or not any(map(is_media, request.token_ids)):
            return ()
        with self._lock:
            return placed(request.token_ids, named_in(request.token_ids, request.media), self.family)

    def prepare(self, request: GenerationRequest) -> None:
        """The same, kept until ``take``: more may wait for the engine than a family remembers."""
        items = self.process(request)
        if items:
            self._waiting[id(request)] = request, items

    def take(self, request: GenerationRequest) -> Sequence[Placed]:
        """The processed items of a request, which is kept no longer."""
        _, items = self._waiting.pop(id(request), (request, None))
        return self.process(request) if items is None else items


def prompt_of(engine: Any, prompt: Sequence[int], items: Sequence[Placed], salt: str | None = None) -> Any:
    """What ``LLMEngine.add_request`` takes.

    Args:
        engine: The ``LLMEngine``.
        prompt: In the vocabulary of the model.
        items: In it.
        salt: Cached prefixes are shared with requests of the same one alone. Of prompts without items.
    """
    from vllm.inputs import tokens_input

    return engine_input(engine, prompt, items) if items else tokens_input(list(prompt), cache_salt=salt)
