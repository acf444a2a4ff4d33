"""nemorl's requests as vLLM's, and vLLM's outputs as completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from nemorl.base.process.timing import Span
from nemorl.errors import BackendError, boundary
from nemorl.media import is_media
from nemorl.types import Completion, FinishReason, GenerationRequest
from nemorl_rl.agents.contract import ConstraintError
from nemorl_rl.data.tokenizer import Tokenizer, declared_limits
from nemorl_rl.rollouts.seeding import mixed_seed
from nemorl_tensors import numbers
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.responses import TimedCompletion

from nemorl_vllm.shown import Shown

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM refuses a higher one, and silently raises a lower one: the log-probs would not be those of the temperature."""


class VLLMLimits:
    """Limits of the requests that vLLM takes."""

    def __init__(self, policy: PolicyConfig, *, speculates: bool = False) -> None:
        """
        Args:
            policy: The model.
            speculates: Tokens are guessed ahead.
        """
        self._speculates = speculates
        with boundary(f"transformers, reading the config of {policy.model_name!r},"):
            config = read_model_config(policy)
        self.model = declared_limits(policy, Tokenizer.of(policy), config)
        self.shown = Shown(policy, config)

    def params(self, request: GenerationRequest, seed: int, *, scores_prompt: bool) -> Any:
        """``vllm.SamplingParams`` of one sample."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        end_ids = frozenset() if sampling.ignore_eos else self.model.end_ids
        return VLLMSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            min_p=sampling.min_p,
            seed=mixed_seed(seed),
            max_tokens=self.model.new_tokens(request),
            stop=list(sampling.stop_strings),
            stop_token_ids=sorted(end_ids.union(sampling.stop_token_ids, self.shown.end_ids)),
            ignore_eos=True,  # the end tokens are among the above: one rule for all of them
            detokenize=bool(sampling.stop_strings),
            include_stop_str_in_output=True,
            # Of the sampled token alone; beside it, in place of a second one, after top-k and top-p (``sampler``).
            logprobs=int(sampling.filtered_logprobs and sampling.temperature > 0),
            prompt_logprobs=0 if scores_prompt else None,
            structured_outputs=None if sampling.json_schema is None else within(sampling.json_schema),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def check(self, index: int, request: GenerationRequest) -> None:
        """Refuse what the engine would refuse, in words that name the request."""
        sampling, problem, fix = request.sampling, None, ""
        if self.shown.family is None:
            self.model.require(index, request)
        else:
            self.model.require(index, replace(request, token_ids=self.shown.words(request), media=()))
        if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
            problem = f"asks for temperature {sampling.temperature:g}; vLLM samples only at those between"
            problem += f" {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
            fix = "set a temperature in that range, 0 for greedy, or generation.backend: hf"
        elif self._speculates and (sampling.min_p > 0 or sampling.filtered_logprobs or sampling.json_schema):
            name = "min_p" if sampling.min_p > 0 else "json_schema" if sampling.json_schema else "filtered_logprobs"
            problem = f"asks for {name}, which vLLM does not have for tokens guessed ahead"
            fix = f"remove {name}, or generation.backend.speculative"
        if problem is not None:
            raise BackendError(f"generation request {index} {problem}", fix=fix)
        if sampling.json_schema is not None:
            require_schema(sampling.json_schema)
        if request.seeds:
            self.shown.prepare(request)  # last: what it keeps waits for the engine's thread


def within(schema: str) -> Any:
    """vLLM's constraint to JSON of a schema, as text."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=schema)


def require_schema(schema: str) -> None:
    """Refuse schemas of which vLLM cannot make a grammar.

    Raises:
        ConstraintError: It says why.
    """
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        validate_xgrammar_grammar(VLLMSamplingParams(structured_outputs=within(schema)))
    except (VLLMValidationError, ValueError, RecursionError) as error:
        raise ConstraintError(f"vLLM cannot sample within this schema: {error}", fix="simplify the schema") from None


def completions(
    samples: Sequence[tuple[Any, Span]], token_ids: Sequence[int], words: Sequence[int], version: int | None = None
) -> list[Completion]:
    """Those of a request.

    Args:
        samples: The ``RequestOutput`` of each, the first with the log-probs of the prompt, and when it was made, in
            seconds since vLLM was given the request.
        token_ids: Of the prompt.
        words: The same as vLLM was given them.
        version: Of the weights that all of its tokens come from, whatever became the newest meanwhile.

    Raises:
        BackendError: One is unusable.
    """
    _require_same_prompt(samples, words)
    known = samples[0][0].prompt_logprobs
    scored = () if known is None else (0.0, *_sampled(known, len(words) - 1))
    prompt = tuple(0.0 if is_media(token) else score for token, score in zip(token_ids, scored, strict=bool(scored)))
    return [_completion(output, span, prompt, version) for output, span in samples]


def _require_same_prompt(samples: Sequence[tuple[Any, Span]], words: Sequence[int]) -> None:
    """An engine that expands an image which is expanded already says so nowhere else."""
    for output, _ in samples:
        if tuple(output.prompt_token_ids) != tuple(words):
            raise BackendError(
                f"vLLM was given {len(words)} tokens as a prompt, and {len(output.prompt_token_ids)} others came back",
                fix="this vLLM changes prompts that are tokens already: use the version that nemorl-vllm asks for",
            )


def _completion(output: Any, span: Span, prompt_logprobs: tuple[float, ...], version: int | None) -> Completion:
    (sample,) = output.outputs
    logprobs = _sampled(sample.logprobs, len(sample.token_ids))
    if not all(map(math.isfinite, logprobs)):
        place = next(index for index, value in enumerate(logprobs) if not math.isfinite(value))
        raise BackendError(
            f"the model's logits are not finite at token {place} of a response",
            fix="the weights have diverged: lower the learning rate, or restart from an earlier checkpoint",
        )
    if sample.finish_reason not in ("stop", "length"):
        raise BackendError(
            f"vLLM ended a request with {sample.finish_reason!r}",
            fix="VLLM_LOGGING_LEVEL=INFO in the environment shows its own report",
        )
    parts = [(int(part.version), part.start) for part in sample.weight_versions] if version is None else [(version, 0)]
    return TimedCompletion(
        numbers.token_ids(sample.token_ids).declared,
        numbers.logprobs(logprobs).declared,
        cast(FinishReason, sample.finish_reason),
        tuple(number for number, _ in parts),
        tuple(start for _, start in parts),
        prompt_logprobs,
        span=span,
    )


def _sampled(flat: Any, tokens: int) -> tuple[float, ...]:
    """Of the one or more log-probs that vLLM's flat form has for each token, the last."""
    each = len(flat.logprobs) // max(1, tokens)
    return tuple(flat.logprobs[each - 1 :: each]) if each else ()
