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

from nemorl_dtensor.model_head import PROBE_TOKENS, TOLERANCE, Score, decoder_states, predicting_states, probe_ids
from nemorl_dtensor.sharding import VALUE_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ValueScorer:
    """A model seen as a function from rows to the values of their scored tokens."""

    decoder: nn.Module
    head: nn.Linear

    @classmethod
    def of(cls, model: PreTrainedModel) -> ValueScorer:
        """Find the decoder and the head of ``model``, and check that they reproduce its output.

        Raises:
            BackendError: They do not.
        """
        scorer = cls.find(model)
        verify_values(model, scorer.score)
        return scorer

    @classmethod
    def find(cls, model: PreTrainedModel) -> ValueScorer:
        """The same unchecked, for a model that has no weights yet."""
        head = dict(model.named_children()).get(VALUE_HEAD)
        if not isinstance(head, nn.Linear):
            raise _unsupported(model, "transformers gives it no linear score on top of its decoder")
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


@torch.no_grad()
def verify_values(model: PreTrainedModel, score: Score, *, width_multiple: int = 1) -> None:
    """Compare ``score`` with the model's own output for a short text. Collective where the model is sharded.

    Raises:
        BackendError: They differ.
    """
    width = -(-PROBE_TOKENS // width_multiple) * width_multiple
    ids = probe_ids(model, width)
    last = torch.tensor([width - 1], device=ids.device)
    found = score(Rows(ids, None, last, last, ids[0, -1:]), 1.0, 1.0)
    expected = model(input_ids=ids, use_cache=False).logits.reshape(-1)[-1:].float()
    error = float((found - expected).abs().max())
    if not error <= TOLERANCE.get(next(model.parameters()).dtype, 1.0):
        raise _unsupported(model, f"decoder and value head give values that are off by {error:.3g}")


def _unsupported(model: PreTrainedModel, why: str) -> BackendError:
    return BackendError(
        f"training backend dtensor cannot put a value head on {type(model).__name__}: {why}",
        fix="use another architecture for the critic or reward model",
    )
