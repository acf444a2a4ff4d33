"""ORPO against TRL 1.16 itself, where it is installed: ``ORPOTrainer`` of ``trl/experimental/orpo/orpo_trainer.py``."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemorl_preference.likelihood import with_likelihood
from nemorl_preference.orpo.loss import ORPOLoss
from peer_batches import assert_equal, drawn_pairs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return pytest.importorskip("trl.experimental.orpo", reason="compares with TRL: pip install trl").ORPOTrainer


def trainer_of(peer: Any, beta: float) -> Any:
    """What ``get_batch_loss_metrics`` reads of a trainer."""
    made = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values),
        aux_loss_enabled=False,
        beta=beta,
        concatenated_inputs=peer.concatenated_inputs,
        get_batch_logps=peer.get_batch_logps,
        is_encoder_decoder=False,
        padding_value=0,
    )
    made.concatenated_forward = lambda *given: peer.concatenated_forward(made, *given)
    made.odds_ratio_loss = lambda *given: peer.odds_ratio_loss(made, *given)
    return made


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_loss_and_gradient_are_those_of_trl_on_fifty_batches(peer: Any, beta: float) -> None:
    for seed in range(50):
        pairs = drawn_pairs(random.Random(seed))
        logits = pairs.logits(torch.Generator().manual_seed(seed))

        def model(*_: Any, logits: Any = logits, **__: Any) -> Any:
            return SimpleNamespace(logits=logits)

        theirs, _ = peer.get_batch_loss_metrics(trainer_of(peer, beta), model, pairs.collated)
        # TRL averages over the tokens of a batch, and learns those of prompts too.
        batch = with_likelihood(pairs.batch, "token", of_prompts=True)
        ours, _ = ORPOLoss(beta)(pairs.logprobs(logits), batch)
        assert_equal(ours, theirs, logits)
