"""Bodies of ``asample``: a prompt in chunks, and how to go on with it."""

from __future__ import annotations

from typing import Any

from nemorl.errors import DataError
from pydantic import BaseModel, ConfigDict, Field

from nemorl_agents.tinker.models import SampleRequest
from nemorl_agents.tinker.wire.bodies import Body
from nemorl_agents.tinker.wire.data import MEDIA_FIX

MOST_SAMPLES = 4096
"""Of one request."""
MOST_TOPK = 1024


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_tokens: int | None = Field(default=None, ge=0)
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class Chunk(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    tokens: list[int] = Field(default_factory=list)


class Prompt(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    chunks: list[Chunk]


class Sample(Body):
    """One request. ``base_model`` and ``model_path`` are of clients without sampling sessions, which are not served."""

    sampling_session_id: str
    seq_id: int = Field(ge=0)
    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    prompt: Prompt
    sampling_params: Params
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MOST_TOPK)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=MOST_TOPK)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def request(self, seed: int, max_context_tokens: int) -> SampleRequest:
        """The request for the models.

        Args:
            seed: Where the client gives none.
            max_context_tokens: Of the base: how far a sample without ``max_tokens`` may go.

        Raises:
            DataError: It asks for what is not served.
        """
        self._require_served()
        token_ids = self._token_ids()
        if len(token_ids) > max_context_tokens:
            raise DataError(f"the prompt has {len(token_ids)} tokens, and the model takes {max_context_tokens}")
        params = self.sampling_params
        room = max_context_tokens - len(token_ids)
        stop = (params.stop,) if isinstance(params.stop, str) else params.stop
        return SampleRequest(
            token_ids=token_ids,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            seed=seed if params.seed is None else params.seed % (1 << 63),
            num_samples=self.num_samples,
            stop=None if stop is None else tuple(stop),  # type: ignore[arg-type]
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
        )

    def _token_ids(self) -> tuple[int, ...]:
        for chunk in self.prompt.chunks:
            if chunk.type != "encoded_text":
                raise DataError(f"the prompt has a chunk of type {chunk.type}", fix=MEDIA_FIX)
        token_ids = tuple(token_id for chunk in self.prompt.chunks for token_id in chunk.tokens)
        if not token_ids:
            raise DataError("the prompt is empty")
        return token_ids

    def _require_served(self) -> None:
        if self.target_prompt_logprobs is not None or self.prompt_alt_tokens_k:
            asked = "prompt_alt_tokens_k" if self.prompt_alt_tokens_k else "target_prompt_logprobs"
            raise DataError(f"{asked} is not served", fix="topk_prompt_logprobs is, and so are cross_entropy passes")
        if self.record_stability_info:
            raise DataError(
                "record_stability_info is not served: the loss that reads it, stable_reinforce, is not public",
                fix="train with importance_sampling or cispo",
            )
        last = self.prompt_logprobs_last_n
        if last is not None and not (self.prompt_logprobs and last > 0):
            raise DataError(f"prompt_logprobs_last_n is {last}", fix="a positive number, together with prompt_logprobs")
