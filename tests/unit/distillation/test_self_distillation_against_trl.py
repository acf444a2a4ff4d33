"""The losses of distillation from oneself against TRL 1.16 itself, where it is installed:
``trl/experimental/sdpo/loss_utils.py``, whose functions give a loss per token, averaged here as ours is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from nemorl_distillation import OPSDConfig, SDPOConfig
from nemorl_distillation.loss import TopKDistillationLoss
from nemorl_distillation.reverse_kl import SampledReverseKLLoss
from nemorl_tensors import TokenBatch
from peer_batches import Padded, assert_equal, drawn, drawn_logits
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

K = 4


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return pytest.importorskip("trl.experimental.sdpo.loss_utils", reason="compares with TRL: pip install trl")


def at_tokens(padded: Padded, logits_BWV: Tensor) -> Tensor:
    """[N, V] the logits of the token before each; zeros at the first of a sequence."""
    zeros = torch.zeros(1, logits_BWV.shape[-1])
    rows = enumerate(padded.sequences)
    return torch.cat([part for row, ids in rows for part in (zeros, logits_BWV[row, : len(ids) - 1])])


def batch_of(padded: Padded) -> TokenBatch:
    return TokenBatch.from_sequences([ids for ids, _ in padded.masked], [mask for _, mask in padded.masked])


def fifty_batches() -> Any:
    for seed in range(50):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        padded = drawn(dice.randint(1, 5), dice)
        yield padded, *(drawn_logits(len(padded.prompts), padded.width, generator) for _ in range(2))


@pytest.mark.parametrize(("outside", "has_tail"), [("tail", True), ("renormalize", False)])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_divergence_and_gradient_are_those_of_trl_on_fifty_batches(
    peer: Any, alpha: float, outside: Any, has_tail: bool
) -> None:
    kinds: dict[float, Any] = {0.0: {"kl_type": "forward"}, 1.0: {"kl_type": "reverse"}}
    knobs = {"outside_topk": outside, **kinds.get(alpha, {"kl_type": "jsd", "jsd_beta": alpha})}
    loss = OPSDConfig(model="some/model", **knobs).build_loss()
    assert isinstance(loss, TopKDistillationLoss)
    for padded, student, teacher in fifty_batches():
        batch, ours, said = batch_of(padded), at_tokens(padded, student), at_tokens(padded, teacher.detach())
        # Its candidates are the student's likeliest; the loss does not ask who chose them.
        ids = ours.detach().topk(K).indices
        read = batch.with_tokens(candidate_ids=ids, teacher_logprobs=torch.log_softmax(said, -1).gather(1, ids))
        per_token = peer.compute_topk_self_distillation_loss(
            ours,
            said,
            distillation_topk=K,
            distillation_alpha=alpha,
            distillation_add_tail=has_tail,
        )
        value, _ = loss(torch.log_softmax(ours, -1).gather(1, ids), read)
        assert_equal(value, per_token[batch.mask].mean(), student)


def test_the_policy_gradient_is_that_of_trl_on_fifty_batches(peer: Any) -> None:
    """Gradients alone: its value is (log p - log q) * log p, ours the mean of log p - log q."""
    loss = SDPOConfig(model="some/model", compare="sampled").build_loss()
    assert isinstance(loss, SampledReverseKLLoss)
    for padded, student, teacher in fifty_batches():
        batch, ours, said = batch_of(padded), padded.logprobs(student), padded.logprobs(teacher.detach())
        read = batch.with_tokens(teacher_logprobs=said, generation_logprobs=ours.detach())
        per_token = peer.compute_sampled_token_self_distillation_loss(
            at_tokens(padded, student), at_tokens(padded, teacher.detach()), batch.token_ids, distillation_alpha=1.0
        )
        (gradient,) = torch.autograd.grad(loss(ours, read)[0], student)
        (theirs,) = torch.autograd.grad(per_token[batch.mask].mean(), student)
        assert float((gradient - theirs).abs().max()) < 5e-6
        assert float(theirs.abs().max()) > 0
