"""PairTrainer: encode a batch of pairs, one optimizer step on how the policy tells them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import ClassVar, TypeVar

from nemorl.contracts import Loss
from nemorl.errors import DataError
from nemorl.metrics import Mean, Metrics, values
from nemorl.trainer import BaseTrainer
from nemorl.types import Row
from nemorl_rl.data.encoding import encode_pair
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.placement.tenant_resources import Remarks, TenantResources
from nemorl_tensors import TokenBatch, pair_batch

from nemorl_preference.pair_config import PairConfig

C = TypeVar("C", bound=PairConfig)


class PairTrainer(BaseTrainer[C]):
    """Learns from pairs of responses. Subclasses set ``loss`` in ``setup``."""

    resources_class = TenantResources
    loss: Loss
    nothing_to_learn: ClassVar[str] = "no pair of this batch has a token to learn from"
    """Says of a batch, in an error, that none of its pairs trains."""
    tokens_beside_text: ClassVar[int] = 0
    """Of a sequence, that are of neither prompt nor response."""

    def setup(self) -> None:
        self.tokenizer = Tokenizer.of(self.config.policy)

    def own_hooks(self) -> Mapping[str, object]:
        return {"nemorl-rl:remarks": Remarks()}

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        batch = self.to_batch(rows)
        if not bool(batch.mask.any()):
            raise DataError(self.nothing_to_learn, fix="raise policy.max_sequence_tokens")
        batch = self.with_reference(batch)
        with self.run.timer.phase("policy_training"):
            update = self.run.policy.train_step(batch, self.loss)
        tokens = batch.num_tokens - self.tokens_beside_text * len(batch)
        return {**update, "total_num_tokens": Mean(tokens), "mean_length": Mean(tokens, len(batch))}

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """The loss and the metrics of training, on held-out pairs."""
        batch, policy = self.with_reference(self.to_batch(rows)), self.run.policy
        outputs = policy.get_values(batch) if self.config.policy_head == "value" else policy.get_logprobs(batch)
        loss, metrics = self.loss(outputs, batch)
        return {"loss": float(loss), **values(metrics)}

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    def to_batch(self, rows: Sequence[Row]) -> TokenBatch:
        """The rows as one ragged batch, chosen and rejected in turn; what is beyond the length limit is cut off."""
        pairs = [encode_pair(row, self.tokenizer) for row in rows]
        return pair_batch(
            [self.sequence(pair.prompt, pair.chosen) for pair in pairs],
            [self.sequence(pair.prompt, pair.rejected) for pair in pairs],
            chain.from_iterable(pair.media for pair in pairs),
        )

    # What an algorithm may define

    def sequence(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[bool]]:
        """Tokens of a prompt and a response to it, and a mask of those that train: the response's."""
        limit = self.config.policy.max_sequence_tokens
        mask = [False] * len(prompt) + [True] * len(response)
        return (prompt + response)[:limit], mask[:limit]

    def with_reference(self, batch: TokenBatch) -> TokenBatch:
        """The batch with what the loss reads of the initial policy: nothing, by default."""
        return batch
