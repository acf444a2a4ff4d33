"""Checks of a server before it gets a request: of a known version, started as a run needs it, with the run's
tokenizer, model and, once it has loaded them, weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError
from nemorl.types import SamplingParams
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from nemorl_agents.servers.dialects.base import Caller, Dialect, Facts

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl_rl.data.tokenizer import Tokenizer

    from nemorl_agents.servers.versions import Weights

PROBE_TEXTS = ("1 + 1 = 2", "Grüße, 世界!\n\tdef f(x):", "the quick brown fox 0123456789")
"""Letters, digits, blanks and bytes beyond ASCII: tokenizers of one family differ in at least one."""
PROBE_TOKENS = 24
TOLERANCE_NATS = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}
"""Mean difference of a log-prob that rounding explains: 5.5e-6, and in bfloat16 0.06, were seen with 135 M parameters.
Other weights differ by about 1."""
SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Keys of a config.json in which two models that can swap weights agree."""


@dataclass
class Identity:
    """The model that servers must serve."""

    policy: PolicyConfig
    config: Any
    """Its transformers config"""
    tokenizer: Tokenizer
    sampling: SamplingParams
    """Of training rollouts"""

    async def require_fit(self, server: Caller, spoken: Dialect, facts: Facts, *, url: str, command: str) -> None:
        """Compare a server with the run.

        Raises:
            BackendError: It does not fit; says in what and what to start instead.
        """
        start = f"start it with: {command}"
        require_version(spoken, facts.version, url)
        for message, fix in facts.problems:
            raise BackendError(f"{spoken.name} at {url}: {message}", fix=f"{fix}; in full: {command}")
        if facts.max_tokens is not None and facts.max_tokens < self.policy.max_sequence_tokens:
            raise BackendError(
                f"{url} serves sequences of at most {facts.max_tokens} tokens; policy.max_sequence_tokens is "
                f"{self.policy.max_sequence_tokens}",
                fix=f"{start} (or lower policy.max_sequence_tokens)",
            )
        for key, served, ours in self._differences(facts):
            message = f"{url} serves another model: {key} is {served} there and {ours} in {self.policy.model_name!r}"
            raise BackendError(message, fix=start)
        require_sampling(facts, self.sampling, url)
        await self._require_tokenizer(server, spoken, facts, url, start)

    def _differences(self, facts: Facts) -> list[tuple[str, Any, Any]]:
        """Sizes that differ, as far as the server says, or its model folder is on this machine too."""
        served: dict[str, Any] = {}
        if facts.architecture is not None:
            served["model_type"] = facts.architecture
        file = Path(facts.source) / "config.json"
        if facts.source and file.is_file():
            served |= json.loads(file.read_text(encoding="utf-8"))
        ours = {**self.config.to_dict(), "model_type": self.config.model_type}
        found = [(key, served[key], ours[key]) for key in SIZES if key in served and key in ours]
        return [(key, theirs, own) for key, theirs, own in found if theirs != own]

    async def _require_tokenizer(self, server: Caller, spoken: Dialect, facts: Facts, url: str, start: str) -> None:
        for text in PROBE_TEXTS:
            theirs, ours = await spoken.tokenize(server, facts, text), self.tokenizer.encode_observation(text)
            # Ids travel, not text: they must mean the same. Versions of transformers split texts differently.
            if _letters(self.tokenizer.decode(theirs)) != _letters(self.tokenizer.decode(ours)):
                raise BackendError(
                    f"{url} has another tokenizer: {text!r} is {_short(theirs)} there, which here means "
                    f"{self.tokenizer.decode(theirs)!r}",
                    fix=start,
                )

    @cached_property
    def probe(self) -> tuple[int, ...]:
        """Tokens whose log-probs are compared: spread over the vocabulary, its last one included."""
        size = int(self.config.get_text_config().vocab_size)
        return (*(7919 * place % size for place in range(1, PROBE_TOKENS)), size - 1)


def require_version(spoken: Dialect, version: str, url: str) -> None:
    """
    Raises:
        BackendError: This package was not written for that version.
    """
    try:
        known = Version(version) in SpecifierSet(spoken.versions, prereleases=True)
    except InvalidVersion:
        known = False
    if not known:
        raise BackendError(
            f"{url} runs {spoken.name} {version}; nemorl-agents speaks with {spoken.versions}",
            fix=f'pip install "{spoken.name.lower()}{spoken.versions}" for the server, or another nemorl-agents',
        )


def sampling_problem(facts: Facts, sampling: SamplingParams) -> str | None:
    """Why a server's log-probs would not be those that training recomputes; ``None`` where they are."""
    truncates = sampling.top_p < 1 or sampling.top_k is not None or sampling.min_p > 0
    if facts.logprobs == "raw" and sampling.temperature not in (0.0, 1.0):
        return f"its log-probs are of temperature 1, and {sampling.temperature:g} is asked for"
    if facts.logprobs == "processed" and truncates and sampling.temperature > 0:
        return "its log-probs are of what top-p, top-k and min-p leave, and training recomputes those of all tokens"
    return None


def require_sampling(facts: Facts, sampling: SamplingParams, url: str) -> None:
    """
    Raises:
        BackendError: The server's log-probs would not be those that training recomputes.
    """
    low, high = facts.temperatures
    if sampling.temperature and not low <= sampling.temperature <= high:
        message = f"{url} samples at temperatures from {low:g} to {high:g}, and {sampling.temperature:g} is asked for"
        raise BackendError(message, fix="set a temperature in that range, or 0 for greedy")
    problem = sampling_problem(facts, sampling)
    if problem is None:
        return
    fix = {
        "raw": "set generation.temperature to 1, or start vLLM with --logprobs-mode processed_logprobs",
        "processed": "set top_p: 1, top_k and min_p to nothing; or start vLLM with --logprobs-mode raw_logprobs and "
        "sample at temperature 1",
    }[facts.logprobs]
    both = "--worker-extension-cls nemorl_vllm.worker.WorkerExtension, with nemorl-vllm beside vLLM, allows both"
    raise BackendError(f"{url}: {problem}", fix=f"{fix}. {both}")


def true_logprobs(weights: Weights, token_ids: Sequence[int]) -> list[float]:
    """Log-probs at temperature 1 of all tokens but the first, by transformers, in float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = AutoModelForCausalLM.from_pretrained(weights.folder, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded.eval()(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, :-1].float()
        scored = torch.log_softmax(logits, -1).gather(1, torch.tensor(list(token_ids[1:]))[:, None])
    found: list[float] = scored.squeeze(1).tolist()
    return found


def require_weights(served: Sequence[float], true: Sequence[float], dtype: str, url: str) -> None:
    """
    Raises:
        BackendError: The server's model is not the one whose weights it was given.
    """
    if gap := weights_gap(served, true, dtype):
        raise BackendError(
            f"{url} loaded the policy's weights and does not compute with them: {gap}",
            fix="start it with the run's own model and without quantisation; vLLM on the CPU needs "
            "--worker-extension-cls nemorl_vllm.worker.WorkerExtension for a model with tied embeddings",
        )


def weights_gap(served: Sequence[float], true: Sequence[float], dtype: str) -> str:
    """By how much log-probs differ, if that is more than rounding; else nothing."""
    gap = sum(abs(one - other) for one, other in zip(served, true, strict=True)) / len(true)
    allowed = TOLERANCE_NATS.get(dtype, TOLERANCE_NATS["bfloat16"])
    if gap <= allowed:
        return ""
    return (
        f"log-probs of {len(true)} probe tokens differ by {gap:.3g} nats on average from transformers' "
        f"({allowed:g} is allowed in {dtype or 'an unknown precision'})"
    )


def _letters(text: str) -> str:
    """Without blanks, of which tokenizers add and drop some."""
    return "".join(text.split())


def _short(ids: Sequence[int]) -> str:
    return f"{list(ids[:8])}{' …' if len(ids) > 8 else ''}"
