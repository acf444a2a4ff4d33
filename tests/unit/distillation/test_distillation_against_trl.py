"""Divergences against TRL 1.16 itself, where it is installed: ``GKDTrainer`` of ``trl/experimental/gkd/gkd_trainer.py``
and, for the likelihood beside them, ``ULDLoss`` of ``trl/experimental/gold/gold_trainer.py``."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemorl_distillation.loss import TopKDistillationLoss
from nemorl_tensors import TokenBatch
from peer_batches import VOCABULARY, Padded, assert_equal, drawn, drawn_logits
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return pytest.importorskip("trl.experimental.gkd", reason="compares with TRL: pip install trl").GKDTrainer


def scores(padded: Padded, logits_BWV: Tensor) -> Tensor:
    """[N, V] log-probs of the whole vocabulary at each token, by the logits of the one before it."""
    parts = []
    for row, ids in enumerate(padded.sequences):
        parts += [torch.zeros(1, VOCABULARY), torch.log_softmax(logits_BWV[row, : len(ids) - 1], -1)]
    return torch.cat(parts)


def ours_of(loss: TopKDistillationLoss, padded: Padded, student: Tensor, teacher: Tensor) -> Tensor:
    """Our loss with all tokens as candidates; the responses are given ones."""
    batch = TokenBatch.from_sequences([ids for ids, _ in padded.masked], [mask for _, mask in padded.masked])
    of_student = scores(padded, student)
    if loss.sft_weight:
        of_student = torch.cat([of_student, padded.logprobs(student)[:, None]], 1)
    batch = batch.with_tokens(
        candidate_ids=torch.zeros(of_student.shape, dtype=torch.int64),
        teacher_logprobs=scores(padded, teacher.detach()),
    ).with_sequences(is_given=torch.ones(len(batch), dtype=torch.bool))
    return loss(of_student, batch)[0]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergence_and_gradient_are_those_of_trl_on_fifty_batches(peer: Any, beta: float) -> None:
    kinds: dict[float, Any] = {0.0: {"kl_type": "forward"}, 1.0: {"kl_type": "reverse"}}
    options = kinds.get(beta, {"kl_type": "jsd", "jsd_beta": beta})
    loss = TopKDistillationLoss(outside_topk="renormalize", **options)
    for seed in range(50):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        padded = drawn(dice.randint(1, 5), dice)
        student, teacher = (drawn_logits(len(padded.prompts), padded.width, generator) for _ in range(2))
        theirs = peer.generalized_jsd_loss(
            student[:, :-1], teacher.detach()[:, :-1], labels=padded.labels[:, 1:], beta=beta
        )
        assert_equal(ours_of(loss, padded, student, teacher), theirs, student)


def test_the_likelihood_beside_it_is_that_of_trl_on_fifty_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer", reason="compares with TRL: pip install trl")
    for seed in range(50):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        padded = drawn(dice.randint(1, 5), dice)
        student, teacher = (drawn_logits(len(padded.prompts), padded.width, generator) for _ in range(2))
        # Its ``__call__`` up to the divergence, which is another one than ours.
        made = SimpleNamespace(
            crossentropy_weight=0.7,
            ignore_index=-100,
            _compute_distillation_loss=lambda *_, **__: torch.zeros(()),
        )
        texts = padded.labels, padded.labels, padded.input_ids, padded.input_ids
        theirs = gold.ULDLoss.__call__(made, student, teacher, *texts)
        with_text, without = (
            ours_of(TopKDistillationLoss(sft_weight=weight), padded, student, teacher) for weight in (0.7, 0.0)
        )
        assert_equal(with_text - without, theirs, student)
