"""The environment ``reward_model``: a sequence classifier as the judge of responses.

# T = texts, W = the longest of a forward pass in tokens

All responses of a turn are scored together: short texts with short ones, so that little of a pass is padding.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts.environment import Environment
from nemorl.errors import BackendError, UsageError, boundary
from nemorl.types import Prompt, Score
from nemorl_rl.chat.rows import tools_of
from nemorl_rl.data.encoding import encode_response
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments.batching import Batcher
from nemorl_tensors.devices import empty_cache
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemorl_preference.rm.config import RewardModelConfig


@dataclass(frozen=True, slots=True)
class _Text:
    ids: list[int]
    segments: list[int] | None = None
    """Which of two texts each token is of, for encoders that want to be told"""

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, limit: int) -> _Text:
        return _Text(self.ids[:limit], None if self.segments is None else self.segments[:limit])


class RewardModel(Environment):
    """Scores prompt plus response with a Hugging Face sequence classifier that has one label."""

    name = "reward_model"
    batched = True

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config
        device = config.device
        if device == "auto":
            device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
        self._tokenizer = Tokenizer.load(config.model)
        self._model = load_classifier(config.model, device, getattr(torch, config.dtype))
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._limit = min(config.max_tokens, longest or config.max_tokens, self._tokenizer.inner.model_max_length)
        self._batcher: Batcher[tuple[Prompt, str], Score] = Batcher(self._score_all)
        self._computing = threading.Lock()

    def score(self, prompt: Prompt, response: str) -> Awaitable[Score]:
        return self._batcher.ask((prompt, response))

    def close(self) -> None:
        self.__dict__.pop("_model", None)
        empty_cache()

    def _score_all(self, asks: list[tuple[Prompt, str]]) -> list[Score]:
        texts = [self._encode(prompt, response).cut(self._limit) for prompt, response in asks]
        with self._computing:  # batches that end at the same time have a thread each
            return [self._scored(value) for value in self._values(texts)]

    def _encode(self, prompt: Prompt, response: str) -> _Text:
        mode = self._config.text
        if mode == "pair":
            encoded = self._tokenizer.inner(prompt.text, response)
            return _Text(encoded["input_ids"], encoded.get("token_type_ids"))
        said = prompt.messages or ({"role": "user", "content": prompt.text},)
        as_chat = mode == "chat" or (mode == "auto" and bool(prompt.messages))
        asked, tools = (said, tools_of(prompt.row)) if as_chat else (prompt.text, ())
        before, after = encode_response(asked, response, self._tokenizer, tools)
        return _Text(before + after)

    def _scored(self, value: float) -> Score:
        settings = self._config.normalization
        if settings is None:
            return Score(value)
        reward = (value - settings.mean) / settings.std
        if settings.clip is not None:
            reward = max(-settings.clip, min(settings.clip, reward))
        return Score(reward, metrics={"reward_model_score": value})

    @torch.inference_mode()
    def _values(self, texts: Sequence[_Text]) -> list[float]:
        """[T] what the model says of each text."""
        found = [0.0] * len(texts)
        # Equal texts and equal sets of texts meet the same passes, in whatever order they were asked for.
        order = sorted(range(len(texts)), key=lambda index: (len(texts[index]), texts[index].ids), reverse=True)
        for part in _passes(order, [len(text) for text in texts], self._config.batch_tokens):
            for index, value in zip(part, self._pass([texts[index] for index in part]), strict=True):
                found[index] = value
        return found

    def _pass(self, texts: Sequence[_Text]) -> list[float]:
        """One forward pass, texts padded on the right to the longest, which comes first."""
        text_config = self._model.config.get_text_config()
        # A decoder's classifier reads the last token that is not its config's padding token. Texts may well end in
        # the tokenizer's (often it is that of end-of-sequence), so padding is a token that none of them holds.
        seen = {token for text in texts for token in text.ids}
        padding = next((token for token in range(text_config.vocab_size) if token not in seen), None)
        if padding is None:
            raise UsageError("a batch holds every token of the vocabulary", fix="set batch_tokens: 1")
        text_config.pad_token_id = padding
        rows = {
            "input_ids": _padded([text.ids for text in texts], padding),
            "attention_mask": _padded([[1] * len(text) for text in texts], 0),
        }
        if texts[0].segments is not None:
            rows["token_type_ids"] = _padded([text.segments or [] for text in texts], 0)
        inputs = {name: values.to(self._model.device) for name, values in rows.items()}
        values: list[float] = self._model(**inputs).logits[:, 0].float().tolist()
        return values


def load_classifier(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A sequence classifier with one label, ready to score.

    Raises:
        BackendError: the model has no trained classification head, or one with several labels.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    path = str(Path(name).expanduser())
    with boundary(f"loading the reward model {name!r}"):
        config = AutoConfig.from_pretrained(path)
    kinds = list(config.architectures or [])
    if config.num_labels != 1 or not any("SequenceClassification" in kind for kind in kinds):
        raise BackendError(
            f"{name!r} is no reward model: its config names {', '.join(kinds) or 'no architecture'} with "
            f"{config.num_labels} label(s), not a sequence classifier with one",
            fix="give a reward model, e.g. the folder `model/` of a run of `algorithm: rm`",
        )
    with boundary(f"loading the reward model {name!r}"):
        model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
    return model.to(device).eval()  # type: ignore[no-any-return]


def _passes(order: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Texts in descending order of length, cut into passes of at most ``budget`` padded tokens."""
    part: list[int] = []
    for index in order:
        if part and lengths[part[0]] * (len(part) + 1) > budget:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def _padded(rows: Sequence[list[int]], padding: int) -> Tensor:
    """[T, W] of rows of which the first is the longest."""
    width = len(rows[0])
    return torch.tensor([row + [padding] * (width - len(row)) for row in rows])
