"""SimPO against TRL 1.16 itself, where it is installed: ``CPOTrainer`` of ``trl/experimental/cpo/cpo_trainer.py``."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemorl_preference.likelihood import with_likelihood
from nemorl_preference.simpo.loss import SimPOLoss
from peer_batches import assert_equal, drawn_pairs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return pytest.importorskip("trl.experimental.cpo", reason="compares with TRL: pip install trl").CPOTrainer


def trainer_of(peer: Any, loss: SimPOLoss) -> Any:
    """What ``get_batch_loss_metrics`` reads of a trainer."""
    made = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values),
        alpha=0.0,
        aux_loss_enabled=False,
        beta=loss.beta,
        concatenated_inputs=peer.concatenated_inputs,
        cpo_alpha=loss.sft_weight,
        get_batch_logps=peer.get_batch_logps,
        is_encoder_decoder=False,
        label_smoothing=loss.label_smoothing,
        loss_type="simpo",
        pad_token_id=0,
        simpo_gamma=loss.gamma,
    )
    made.concatenated_forward = lambda *given: peer.concatenated_forward(made, *given)
    made.cpo_loss = lambda *given: peer.cpo_loss(made, *given)
    return made


@pytest.mark.parametrize(
    "loss",
    [SimPOLoss(2.0), SimPOLoss(2.5, gamma=0.3), SimPOLoss(2.0, 1.0, gamma=0.5), SimPOLoss(1.0, label_smoothing=0.1)],
    ids=["paper", "small margin", "with the likelihood", "smoothed"],
)
def test_loss_and_gradient_are_those_of_trl_on_fifty_batches(peer: Any, loss: SimPOLoss) -> None:
    for seed in range(50):
        pairs = drawn_pairs(random.Random(seed))
        logits = pairs.logits(torch.Generator().manual_seed(seed))

        def model(*_: Any, logits: Any = logits, **__: Any) -> Any:
            return SimpleNamespace(logits=logits)

        theirs, _ = peer.get_batch_loss_metrics(trainer_of(peer, loss), model, pairs.collated)
        ours, _ = loss(pairs.logprobs(logits), with_likelihood(pairs.batch, "token"))
        assert_equal(ours, theirs, logits)
