"""Text to tokens and back, on the driver. transformers is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.text.reading import expanded
from nemorl.errors import BackendError, boundary

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl_media.family import Family
    from nemorl_tensors.engines.responses import ResponseLimits

    from nemorl_rl.chat.learnt import RowChat


def encodable(text: str) -> str:
    """A text that a tokenizer takes: what JSON or a file's name may hold of half characters is U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what training needs."""

    def __init__(
        self, inner: Any, template_kwargs: Mapping[str, Any] | None = None, policy: TrainingOptions | None = None
    ) -> None:
        """
        Args:
            inner: The ``transformers`` tokenizer.
            template_kwargs: What its chat template is given besides messages.
            policy: The model that it belongs to, which may see or hear. Unset: text alone.
        """
        self.inner = inner
        """The ``transformers`` tokenizer itself."""
        self.template_kwargs = template_kwargs or {}
        """Arguments of its chat template besides messages."""
        self._policy = policy

    @classmethod
    def of(cls, policy: TrainingOptions) -> Tokenizer:
        """The tokenizer of a policy's model, or what ``policy.tokenizer`` puts in its place.

        Raises:
            BackendError: There is no such tokenizer or template, or the template reads other arguments.
        """
        from nemorl_tensors.engines.chat_templates import chat_template_text, require_used

        settings = policy.tokenizer
        found = cls.load(settings.name or policy.model_name)
        if settings.chat_template is not None:
            found.inner.chat_template = chat_template_text(settings.chat_template)
        if settings.chat_template_kwargs and found.has_chat_template:
            require_used(str(found.inner.chat_template), settings.chat_template_kwargs)
        return cls(found.inner, settings.chat_template_kwargs, policy)

    @classmethod
    def load(cls, model_name: str) -> Tokenizer:
        """The tokenizer of a model folder or hub name."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        name = str(expanded(model_name))
        with boundary(f"loading the tokenizer of {model_name!r}"), _missing_model(model_name):
            # AutoTokenizer (transformers 5) picks the class by the model's architecture and rebuilds its splitting
            # rules, even for a folder whose tokenizer says that tokenizer.json is all there is to it.
            declared = get_tokenizer_config(name).get("tokenizer_class")
            generic = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
            return cls((PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(name))

    def with_options(self, options: Mapping[str, Any]) -> Tokenizer:
        """The same tokenizer, whose chat template is given these variables, over those that it has. One that the
        template does not read changes nothing."""
        return Tokenizer(self.inner, {**self.template_kwargs, **options}, self._policy)

    @cached_property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    @cached_property
    def family(self) -> Family | None:
        """How the model sees or hears; ``None`` where it reads text alone."""
        if self._policy is None:
            return None
        from nemorl_media.slots import family_of
        from nemorl_tensors.engines.model_config import name_or_path, read_model_config

        return family_of(read_model_config(self._policy), name_or_path(self._policy), self._policy.media.processor)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """The end-of-sequence token of the tokenizer."""
        return frozenset({self.inner.eos_token_id} - {None})

    def encode(self, text: str) -> list[int]:
        """Tokens of raw text, with the special tokens the tokenizer adds itself."""
        ids: list[int] = self.inner(encodable(text))["input_ids"]
        return ids

    def encode_observation(self, text: str) -> list[int]:
        """Tokens of text that is appended to a running sequence: no special tokens."""
        ids: list[int] = self.inner(encodable(text), add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, images and sounds."""
        from nemorl_tensors.numbers import text_ids

        text: str = self.inner.decode(text_ids(token_ids), skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str:
        """The text of one token, a special one too."""
        text: str = self.inner.decode([token_id])
        return text

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Tokens of a conversation, ending where the assistant begins to speak.

        Raises:
            BackendError: the model has no chat template.
            DataError: its template refuses the messages, or does not show the tools.
        """
        return self.chat.prompt(messages, tools)

    @cached_property
    def chat(self) -> RowChat:
        """Conversations of rows as tokens, by the chat template that the tokenizer has now."""
        from nemorl_rl.chat.learnt import RowChat

        return RowChat(self)

    def save(self, path: Path) -> None:
        self.inner.save_pretrained(path)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """A conversation as the chat template writes it.

        Args:
            messages: In the form in which the template reads them.
            tools: As OpenAI's chat completions write them.
            add_generation_prompt: End where the assistant begins to speak.

        Raises:
            BackendError: the model has no chat template.
            ForeignError: the template raised.
        """
        if not self.has_chat_template:
            raise BackendError(
                "the model's tokenizer has no chat template, but the data holds chat messages",
                fix="use an instruction-tuned model, or rows with a plain text `prompt`",
            )
        with boundary("the chat template"):
            text: str = self.inner.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        return text


def context_tokens(model_name: str) -> int | None:
    """Tokens that a model can attend to, as its config says; ``None`` where it does not say.

    Args:
        model_name: Folder or hub name.
    """
    from transformers import AutoConfig

    with _missing_model(model_name):
        config = AutoConfig.from_pretrained(expanded(model_name))
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def end_token_ids(model_name: str, tokenizer: Tokenizer, *declared: int | Sequence[int] | None) -> frozenset[int]:
    """Every token that ends a response of a model.

    Args:
        model_name: Folder or hub name, for its generation config.
        tokenizer: Of the model.
        *declared: What the model's config says: a token, several, or nothing.
    """
    from transformers import GenerationConfig

    try:
        stored = GenerationConfig.from_pretrained(expanded(model_name)).eos_token_id
    except OSError:  # the file is optional
        stored = None
    ids = {token for value in (stored, *declared) for token in (value if isinstance(value, Sequence) else [value])}
    return tokenizer.stop_token_ids.union(token for token in ids if token is not None)


def declared_limits(policy: TrainingOptions, tokenizer: Tokenizer, config: Any) -> ResponseLimits:
    """The limits of requests to a model, going by its config alone: an engine elsewhere has the model itself."""
    from nemorl_tensors.engines.responses import ResponseLimits

    text = config.get_text_config()
    declared = (getattr(config, "eos_token_id", None), getattr(text, "eos_token_id", None))
    ends = end_token_ids(policy.model_name, tokenizer, *declared)
    limits = ResponseLimits(text.vocab_size, policy.max_sequence_tokens, ends, tokenizer.decode)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None or positions >= limits.max_sequence_tokens:
        return limits
    return replace(limits, max_sequence_tokens=positions, bound="the model's max_position_embeddings")


@contextmanager
def _missing_model(model_name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(
            f"model {model_name!r} cannot be read: {reason}",
            fix="give a folder that holds config.json and the tokenizer, or a hub name that is cached or reachable",
        ) from error
