"""Options of the backend's ``speculative``, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from nemorl.config import Config, ModelName
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl_rl.drafts.config import DRAFT_METRICS, FreshDraft, KeepFresh
from pydantic import Field

SPECULATION_METRICS: Mapping[str, MetricInfo] = {
    "train/draft_guessed_tokens": MetricInfo(
        "Tokens guessed ahead",
        "tokens",
        "`speculative`: tokens of a step that were guessed ahead; without any, the two metrics below are left out",
        "far below the tokens sampled: little repeats, as at high temperatures; `prompt_lookup_min: 1` guesses more",
    ),
    "train/draft_acceptance_rate": MetricInfo(
        "Guessed tokens",
        "share",
        "`speculative`: share of the tokens guessed ahead that the model accepted",
        "below 0.2: fewer `num_speculative_tokens`, or none; of a few guesses it says nothing",
        smooth=True,
    ),
    "train/draft_acceptance_length": MetricInfo(
        "Tokens per checked guess",
        "tokens",
        "`speculative`: tokens that a pass over a guess gave, one of them the model's own; 1 is as without guesses",
        smooth=True,
    ),
    **DRAFT_METRICS,
}


class SpeculativeConfig(Config):
    """Guess tokens ahead, and let the model check several in one pass. What is sampled has the same distribution.

    Example:
        >>> SpeculativeConfig(num_speculative_tokens=2).prompt_lookup_max
        4
    """

    method: Literal["ngram", "draft_model", "eagle3", "mtp"] = "ngram"
    """``ngram``: what followed the last tokens where they stood before, in the prompt or the response. ``draft_model``:
    what a smaller model of the same tokenizer draws. ``eagle3``: what a head draws that was trained to read the hidden
    states of the policy (EAGLE-3, arXiv:2503.01840). As the policy moves away from them, fewer of their guesses are
    accepted; a ``draft_model`` can be kept fresh. ``mtp``: what the policy's own MTP layers draw (DeepSeek-V3,
    arXiv:2412.19437), which updates reach where the trainer trains them (``policy.backend.mtp`` of megatron)."""
    model: ModelName | None = None
    """The smaller model or the head, a folder or a name on the Hugging Face Hub."""
    keep_fresh: KeepFresh | None = None
    """Train the smaller model on what the policy samples, and give it to the engine with each update of the policy,
    e.g. ``{lr: 1e-4}``. Unset: it stays as stored."""
    num_speculative_tokens: int = Field(4, ge=1, le=32)
    """Tokens guessed at a time. Lower it when few are accepted (``train/draft_acceptance_rate``)."""
    prompt_lookup_min: int = Field(2, ge=1)
    """Fewest last tokens that must have stood together before."""
    prompt_lookup_max: int = Field(4, ge=1)
    """Most last tokens that are looked for; the longest match wins."""

    @property
    def has_weights(self) -> bool:
        """Guesses come from layers that are not the policy's."""
        return self.method != "ngram"

    @property
    def needs_model(self) -> bool:
        """These are in files of their own."""
        return self.method in ("draft_model", "eagle3")

    @property
    def fresh_draft(self) -> FreshDraft | None:
        """The smaller model, where the run trains it."""
        if self.keep_fresh is None or self.model is None:
            return None
        return FreshDraft(self.model, self.keep_fresh)

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.needs_model and self.model is None:
            yield ConfigIssue("model", f"method {self.method!r} guesses with a model", "give its folder or its name")
        if self.has_weights and {"prompt_lookup_min", "prompt_lookup_max"} & self.model_fields_set:
            message = f"method {self.method!r} does not look at what stood before"
            yield ConfigIssue("prompt_lookup_max", message, "remove prompt_lookup_min and prompt_lookup_max")
        if self.model is not None and not self.needs_model:
            message = f"method {self.method!r} guesses without a model of its own"
            yield ConfigIssue("model", message, "remove model, or set method: draft_model")
        if self.keep_fresh is not None and self.method != "draft_model":
            reads = (
                "guesses without a model" if self.method == "ngram" else "reads hidden states, which are not at hand"
            )
            message = f"the draft of method {self.method!r} cannot be trained: it {reads}"
            yield ConfigIssue("keep_fresh", message, "use a small model (method: draft_model), or remove keep_fresh")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            yield ConfigIssue("prompt_lookup_min", "is above prompt_lookup_max", "swap them")
