"""KTO against TRL 1.16 itself, where it is installed: ``KTOTrainer`` of ``trl/trainer/kto_trainer.py``."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemorl_preference.kto.loss import KTOLoss, reference_point
from nemorl_preference.kto.rows import Judged, judged, mismatched, to_batch
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch, segment_sum
from peer_batches import IGNORED, Padded, assert_equal, drawn, drawn_logits

trl = pytest.importorskip("trl", reason="compares with TRL: pip install trl")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LIMIT = 64


class GivenModel(torch.nn.Module):
    """Answers as a patched model of TRL does, from logits that are given: matched sequences, and mismatched ones."""

    is_gradient_checkpointing = False

    def __init__(self, logits: torch.Tensor, others: torch.Tensor, other_ids: torch.Tensor) -> None:
        super().__init__()
        self._logits, self._others, self._other_ids = logits, others, other_ids

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        logits = self._others if input_ids is self._other_ids else self._logits
        targets = labels[:, 1:]
        logprobs = torch.log_softmax(logits[:, :-1], -1)
        picked = logprobs.gather(2, targets.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(
            log_probs=torch.where(targets == IGNORED, 0.0, picked),
            entropy=torch.zeros_like(picked),
            mean_logits=torch.zeros_like(picked),
        )


def trainer_of(loss: KTOLoss, model: GivenModel, reference: GivenModel) -> Any:
    """What ``_compute_loss`` reads of a trainer."""
    made = SimpleNamespace(
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        beta=loss.beta,
        calculate_KL=True,
        desirable_weight=loss.desirable_weight,
        loss_type="kto",
        model=model,
        precompute_ref_logps=False,
        ref_model=reference,
        undesirable_weight=loss.undesirable_weight,
    )
    made._compute_kl_logps = lambda *given: trl.KTOTrainer._compute_kl_logps(made, *given)
    return made


def ours_of(answers: list[Judged], padded: Padded, logits: torch.Tensor) -> tuple[TokenBatch, torch.Tensor]:
    """A batch, and the log-probs of its tokens."""
    batch = to_batch(answers, LIMIT)
    assert batch.token_ids.tolist() == [token for ids in padded.sequences for token in ids]
    return batch, padded.logprobs(logits)


@pytest.mark.parametrize("loss", [KTOLoss(0.1), KTOLoss(0.5, 1.33, 0.7)], ids=["plain", "weighted"])
def test_loss_and_gradient_are_those_of_trl_on_fifty_batches(loss: KTOLoss) -> None:
    points = []
    for seed in range(50):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        count = dice.randint(2, 6)
        padded = drawn(count, dice)
        others = Padded(padded.prompts, padded.responses[-1:] + padded.responses[:-1])
        labels = [dice.random() < 0.5 for _ in range(count)]
        shapes = [(count, padded.width), (count, others.width)] * 2
        logits, other_logits, *of_reference = (drawn_logits(*shape, generator) for shape in shapes)
        given = {
            "input_ids": padded.input_ids,
            "attention_mask": padded.attention_mask,
            "completion_mask": padded.completion_mask,
            "KL_input_ids": others.input_ids,
            "KL_attention_mask": others.attention_mask,
            "KL_completion_mask": others.completion_mask,
            "label": torch.tensor(labels),
        }
        model = GivenModel(logits, other_logits, given["KL_input_ids"])
        reference = GivenModel(of_reference[0], of_reference[1], given["KL_input_ids"])
        trainer = trainer_of(loss, model, reference)
        theirs = trl.KTOTrainer._compute_loss(trainer, model, given, False)

        parts = zip(padded.prompts, padded.responses, labels, strict=True)
        answers = [Judged(prompt, reply, [True] * len(reply), label) for prompt, reply, label in parts]
        with torch.no_grad():
            batch, of_policy = ours_of(mismatched(answers), others, other_logits)
            reference_B = segment_sum(others.logprobs(of_reference[1]), batch.mask, batch.lengths)
            point = reference_point(of_policy, batch, reference_B)
            points.append(point)
            assert point == pytest.approx(trainer._metrics["train"]["kl"][0], abs=2e-6)
        batch, of_policy = ours_of(answers, padded, logits)
        with torch.no_grad():
            reference_B = segment_sum(padded.logprobs(of_reference[0]), batch.mask, batch.lengths)
        batch = batch.with_sequences(
            reference_response_logprobs=reference_B, reference_points=torch.full((count,), point)
        )
        ours, _ = loss(of_policy, batch)
        assert_equal(ours, theirs, logits)
    assert 10 < sum(point > 0 for point in points) < 40  # on both sides of the bound


def test_prompts_meet_the_responses_that_they_meet_in_a_run_of_trl(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=64)
    rows = [{"prompt": f"{n}+1=", "completion": "1" * (n + 1), "label": n % 2 == 0} for n in range(4)]
    seen: list[dict[str, Any]] = []

    class Recording(trl.KTOTrainer):  # type: ignore[misc, name-defined]
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            seen.append(inputs)
            return super()._compute_loss(model, inputs, return_outputs)

    config = AutoConfig.from_pretrained(folder)
    model, reference = (AutoModelForCausalLM.from_config(config) for _ in range(2))  # type: ignore[no-untyped-call]
    trainer = Recording(
        model=model,
        ref_model=reference,
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=trl.KTOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=4,
            max_steps=1,
            report_to=[],
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
    )
    trainer.train()

    def kept(kind: str) -> list[tuple[list[int], list[int]]]:
        """Tokens of each sequence, and of its response, in TRL's batch."""
        fields = [seen[0][f"{kind}{name}"] for name in ("input_ids", "attention_mask", "completion_mask")]
        parts = zip(*fields, strict=True)
        return [(ids[mask == 1].tolist(), ids[answer == 1].tolist()) for ids, mask, answer in parts]

    tokenizer = Tokenizer.load(str(folder))
    answers = [one for row in rows for one in judged(row, tokenizer)]
    for kind, ours in (("", answers), ("KL_", mismatched(answers))):
        assert kept(kind) == [(one.prompt + one.response, one.response) for one in ours]
