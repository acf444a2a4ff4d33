"""One number per token instead of log-probs: critics and reward models.

# M = scored tokens, D = hidden size

The model is transformers' sequence classifier with one label: a decoder, and a linear map from its states to a number.
The value at index t is that of the state before token t, as the log-prob at t is what that state says of it. A reward
model scores a whole text, so its value stands one past the end: at a token added to the text, which is never fed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from nemorl.errors import BackendError
from nemorl_tensors.engines.rows import Rows
from nemorl_tensors.filtering import TokenFilter
from torch import Tensor, nn

from nemorl_dtensor.model_head import decoder_states, predicting_states
from nemorl_dtensor.sharding import VALUE_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ValueScorer:
    """A model seen as a function from rows to the values of their scored tokens."""

    decoder: nn.Module
    head: nn.Linear

    @classmethod
    def find(cls, model: PreTrainedModel) -> ValueScorer:
        """Find the decoder and the head of ``model``, which may have no weights yet.

        Raises:
            BackendError: transformers gives it no such head.
        """
        head = dict(model.named_children()).get(VALUE_HEAD)
        if not isinstance(head, nn.Linear):
            raise no_value_head(model, "transformers gives it no linear score on top of its decoder")
        return cls(model.get_decoder(), head)  # type: ignore[no-untyped-call]

    def score(
        self, rows: Rows, temperature: float = 1.0, factor: float = 1.0, keep: TokenFilter | None = None
    ) -> Tensor:
        """[M] float32 values before the scored tokens, differentiable. How tokens are sampled plays no part."""
        states_MD = self.states(rows)
        return self.of_states(states_MD if factor == 1.0 else states_MD * factor, rows, temperature, keep)

    def states(self, rows: Rows) -> Tensor:
        """[M, D] states that predict the scored tokens."""
        return predicting_states(decoder_states(self.decoder, rows), rows)

    def of_states(self, states_MD: Tensor, _rows: Rows, _temperature: float, _keep: TokenFilter | None) -> Tensor:
        """[M] float32 from the states that predict the scored tokens."""
        weight, bias = self.head.weight, self.head.bias
        return torch.nn.functional.linear(states_MD, weight, bias).squeeze(-1).float()


def no_value_head(model: PreTrainedModel, why: str) -> BackendError:
    return BackendError(
        f"training backend dtensor cannot put a value head on {type(model).__name__}: {why}",
        fix="use another architecture for the critic or reward model",
    )
