"""Log-probs from a Hugging Face model without its ``[N, V]`` logits: hidden states first, then the head by chunks.

# R = rows, W = row width, M = scored tokens, D = hidden size, V = vocabulary

That split assumes ``logits = cap(head(decoder(ids)) * scale)``. Not every architecture keeps to it, so ``verification``
compares it with the model's own forward pass when it is built: wrong numbers are an error, never a result.
``sharded_head`` has the same for a model that is spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError
from nemorl_media.sight import Sight
from nemorl_tensors import linear_logprobs, linear_topk_logprobs
from nemorl_tensors.engines.rows import Rows
from nemorl_tensors.filtering import TokenFilter, filtered
from nemorl_tensors.logprobs import Gradient, LowRank
from torch import Tensor, nn

from nemorl_dtensor.tree_attention import tree_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_states(decoder: nn.Module, rows: Rows, sight: Sight | None = None) -> Tensor:
    """[R, W, D] last hidden states, of rows with images or sounds by a model that has ``sight``."""
    extra: dict[str, Any] = {}
    if rows.tree is not None:
        extra = tree_arguments(rows.tree, next(decoder.parameters()).dtype, rows.input_ids.device)
    # Without a cache, or packed samples would see each other (transformers 5.19).
    states: Tensor = decoder(use_cache=False, **_inputs(decoder, rows, sight), **extra).last_hidden_state
    return states


def _inputs(decoder: nn.Module, rows: Rows, sight: Sight | None) -> dict[str, Any]:
    if sight is not None:
        return sight.inputs(rows)
    if rows.media:
        raise BackendError(
            f"the batch has images or sounds, and {type(decoder).__name__} reads text alone",
            fix="use a model that sees, or leave such rows out",
        )
    extra = {} if rows.position_ids is None else {"position_ids": rows.position_ids}
    return {"input_ids": rows.input_ids, **extra}


def predicting_states(states: Tensor, rows: Rows) -> Tensor:
    """[M, D] of the [R, W, D] states: those that predict the scored tokens."""
    return states.flatten(0, 1).index_select(0, rows.predictors)


@dataclass(frozen=True)
class Scorer:
    """A model seen as a function from rows to the log-probs of their scored tokens."""

    decoder: nn.Module
    head: nn.Module
    softcap: float | None
    scale: float
    chunk_tokens: int | None
    gradient: Gradient | None = None
    """Where the gradient of the head's weight is added up, if not by autograd"""
    sight: Sight | None = None
    """Of a model that sees or hears"""
    adapted: Callable[[Tensor], LowRank | None] | None = None
    """[..., D] states -> what adapters on the head add to its output"""

    @classmethod
    def find(cls, model: PreTrainedModel, *, sight: Sight | None = None, chunk_tokens: int | None = None) -> Scorer:
        """Find the decoder and the head of ``model``, which may have no weights yet.

        Raises:
            BackendError: It has no such parts, or another formula.
        """
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        if head is None or decoder is model:
            raise unsupported(model, "it has no output head apart from its decoder")
        config = model.config.get_text_config()
        softcap, scale = getattr(config, "final_logit_softcapping", None), _logit_scale(config)
        if softcap is not None and scale != 1.0:
            raise unsupported(model, "it both scales and caps its logits")
        return cls(decoder, head, softcap, scale, chunk_tokens, sight=sight)

    def score(self, rows: Rows, temperature: float, factor: float = 1.0, keep: TokenFilter | None = None) -> Tensor:
        """float32 log-probs at ``temperature`` of ``rows.target_ids``, in their shape; differentiable.

        ``factor`` multiplies the decoder's states, to check the head on logits of any size. ``keep`` truncates the
        distribution.
        """
        picked_MD = self.states(rows)
        return self.of_states(picked_MD if factor == 1.0 else picked_MD * factor, rows, temperature, keep)

    def states(self, rows: Rows) -> Tensor:
        """[M, D] states that predict the scored tokens."""
        return predicting_states(decoder_states(self.decoder, rows, self.sight), rows)

    def of_states(self, states_MD: Tensor, rows: Rows, temperature: float, keep: TokenFilter | None = None) -> Tensor:
        """The same from the states that predict the scored tokens."""
        score = partial(
            linear_logprobs,
            states_MD,
            self.weight,
            rows.target_ids,
            **self.options(temperature),
            weight_gradient=self.gradient,
            low_rank=self.low_rank(states_MD),
        )
        return filtered(score, keep)

    def topk(self, rows: Rows, temperature: float, k: int) -> tuple[Tensor, Tensor]:
        """[M, K] token ids and log-probs of the k likeliest tokens where a token is scored, without gradient."""
        states_MD = self.states(rows)
        low_rank = self.low_rank(states_MD)
        return linear_topk_logprobs(states_MD, self.weight, k, **self.options(temperature), low_rank=low_rank)

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] float32 of [..., D] states, as the model gives them."""
        logits = nn.functional.linear(states, self.weight, self.bias).float()
        if (low_rank := self.low_rank(states)) is not None:
            low, factor = low_rank
            logits = logits + nn.functional.linear(low, factor.to(low.dtype)).float()
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def low_rank(self, states: Tensor) -> LowRank | None:
        """What adapters add to the head's output; ``None`` where it has none, or they are off."""
        return None if self.adapted is None else self.adapted(states)

    @property
    def weight(self) -> Tensor:
        """[V, D] of the head."""
        found = self.head.weight
        assert isinstance(found, Tensor)
        return found

    def options(self, temperature: float) -> dict[str, Any]:
        """How the head's output becomes log-probs."""
        return {
            "bias": self.bias,
            "temperature": self.temperature(temperature),
            "softcap": self.softcap,
            "chunk_tokens": self.chunk_tokens,
        }

    @property
    def bias(self) -> Tensor | None:
        """[V] of the head, if it has one."""
        found: Tensor | None = getattr(self.head, "bias", None)
        return found

    def temperature(self, asked: float) -> float:
        """Divisor of the head's raw output. Greedy batches (temperature 0) are scored at 1."""
        return (asked or 1.0) / self.scale


def _logit_scale(config: Any) -> float:
    """Factor of the head's output: Cohere's ``logit_scale``, Granite's divisor, Falcon-H1's multiplier."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factors = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
    return float(factors[0] * factors[1] / divisor)


def unsupported(model: PreTrainedModel, why: str) -> BackendError:
    return BackendError(
        f"training backend dtensor cannot score {type(model).__name__}: {why}",
        fix="use another architecture or training backend (`nemorl plugins list`)",
    )
