"""The tensors of training: the ragged batch, log-probs, masked reductions and KL estimators.

Importing this package imports torch; ``import nemorl`` does not.
"""

from nemorl_tensors.batch import LossAggregation, TokenBatch, loss_weights
from nemorl_tensors.functional import (
    masked_max,
    masked_mean,
    masked_min,
    segment_ids,
    segment_mean,
    segment_sum,
    standardized,
)
from nemorl_tensors.kl import KL_ESTIMATORS, KLTerm, KLType, kl_k1, kl_k2, kl_k3
from nemorl_tensors.logprobs import linear_logprobs, linear_topk_logprobs, next_token_targets
from nemorl_tensors.pairs import pair_batch, pair_weights, preference_metrics, split_pairs
from nemorl_tensors.parallel_logprobs import vocab_parallel_logprobs, vocab_parallel_topk_logprobs

__all__ = [
    "KL_ESTIMATORS",
    "KLTerm",
    "KLType",
    "LossAggregation",
    "TokenBatch",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "linear_logprobs",
    "linear_topk_logprobs",
    "loss_weights",
    "masked_max",
    "masked_mean",
    "masked_min",
    "next_token_targets",
    "pair_batch",
    "pair_weights",
    "preference_metrics",
    "segment_ids",
    "segment_mean",
    "segment_sum",
    "split_pairs",
    "standardized",
    "vocab_parallel_logprobs",
    "vocab_parallel_topk_logprobs",
]
