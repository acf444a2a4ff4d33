"""Log-probs of the very pass that a loss and its gradient were computed in.

# N = tokens of all sequences concatenated, K = target tokens at each position
"""

from __future__ import annotations

from dataclasses import dataclass

from nemorl.contracts import Loss
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch
from torch import Tensor

PLACE = "place"
"""[N] int64 field of a batch: where in it a token stands, whatever microbatch it is computed in."""


@dataclass(frozen=True, eq=False)
class RecordedLoss:
    """A loss that keeps what the model says, for a policy in this process."""

    loss: Loss
    outputs: Tensor
    """[N] or [N, K] float32, written to in the order of the batch"""

    @property
    def requires(self) -> frozenset[str]:
        return self.loss.requires | {PLACE}

    def __call__(self, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        self.outputs[batch[PLACE].to(self.outputs.device)] = outputs.detach().to(self.outputs)
        return self.loss(outputs, batch)
