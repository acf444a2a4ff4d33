"""One optimizer step: gradients that do not depend on batching, AdamW as PyTorch defines it, metrics that add up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from nemorl.config import ScheduleConfig
from nemorl.contracts.memory import DeviceMemoryError
from nemorl.errors import BackendError, ForeignError, UsageError
from nemorl.metrics import Metrics
from nemorl_dtensor.training import DTensorBackend
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import plan_microbatches
from nemorl_tensors.engines.steps import schedule_factor
from recorded_messages import Raises
from torch import Tensor
from transformers import AutoModelForCausalLM

from .conftest import Build


def gradients(backend: DTensorBackend, batch: TokenBatch, loss: Any) -> dict[str, Tensor]:
    """Gradients as the optimizer meets them, which then makes its step."""
    backend.clear_gradients()
    backend.forward_backward(batch, loss)
    masters = backend._optimizer._masters
    found = {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}
    backend.optimizer_step()
    return found


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    total = math.sqrt(sum(float(g.double().square().sum()) for g in one.values()))
    difference = math.sqrt(sum(float((one[n] - other[n]).double().square().sum()) for n in one))
    assert difference <= tolerance * total


def test_one_two_and_eight_microbatches_give_one_gradient(build: Build, weighted_nll: Any) -> None:
    lengths = [12, 11, 10, 9, 8, 7, 6, 5]
    ragged = TokenBatch.from_sequences(
        [[(7 * i + t) % 80 + 8 for t in range(n)] for i, n in enumerate(lengths)],
        [[False] * 3 + [True] * (n - 3) for n in lengths],
    )
    ragged = ragged.with_tokens(advantages=torch.linspace(-1.0, 2.0, ragged.num_tokens))
    counts, found = [], []
    for budget in (10_000, 48, 1):  # 48: four rows of 12 fit, then four of 8
        counts.append(len(plan_microbatches(ragged, budget)))
        found.append(gradients(build(microbatch_tokens=budget), ragged, weighted_nll))
    assert counts == [1, 2, 8]
    assert_same_gradients(found[0], found[1])
    assert_same_gradients(found[0], found[2])


def test_microbatching_does_not_change_the_gradient(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    counts, found = [], []
    for budget in (10_000, 80, 1):
        counts.append(len(plan_microbatches(batch, budget)))
        found.append(gradients(build(microbatch_tokens=budget), batch, weighted_nll))
    assert counts[0] == 1
    assert counts[1] in (2, 3)
    assert counts[2] == 7
    assert_same_gradients(found[0], found[1])
    assert_same_gradients(found[0], found[2])


@pytest.mark.parametrize("changes", [{"options": {"layout": "packed"}}, {"activation_checkpointing": True}])
def test_layout_and_recomputation_do_not_change_the_gradient(
    changes: dict[str, Any], build: Build, batch: TokenBatch, weighted_nll: Any
) -> None:
    assert_same_gradients(
        gradients(build(), batch, weighted_nll), gradients(build(**changes), batch, weighted_nll), 2e-6
    )


def test_one_step_equals_plain_transformers_and_adamw(
    pretrained: Path, build: Build, batch: TokenBatch, weighted_nll: Any
) -> None:
    backend = build(max_grad_norm=0.5, optimizer={"lr": 1e-2, "weight_decay": 0.1})
    metrics = backend.train_step(batch, weighted_nll)

    model = AutoModelForCausalLM.from_pretrained(pretrained)
    model.get_input_embeddings().padding_idx = None  # the padding token is among those trained on
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    loss, start = torch.zeros(()), 0
    for length in batch.lengths.tolist():
        part = slice(start, start + length)
        ids, keep = batch.token_ids[part], batch.mask[part]
        logps = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None]).squeeze(1)
        weights = (batch["advantages"] * batch.loss_weights)[part][1:]
        loss = loss - (logps * weights)[keep[1:]].sum()
        start += length
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    adamw.step()

    assert metrics["loss"].value == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"].value == pytest.approx(norm.item(), rel=1e-5)
    assert float(norm) > 0.5
    for name, expected in model.named_parameters():
        # Adam divides by |g|: where the gradient is rounding, so is the direction of the first step. Compare the rest.
        clear = expected.grad.abs() > 1e-5
        torch.testing.assert_close(backend._trainable[name][clear], expected[clear], atol=2e-5, rtol=1e-4, msg=name)


def test_nan_in_masked_slots_changes_nothing(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    poisoned = batch.with_tokens(advantages=torch.where(batch.mask, batch["advantages"], torch.nan))
    clean, dirty = gradients(build(), batch, weighted_nll), gradients(build(), poisoned, weighted_nll)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_a_loss_that_lacks_a_field_is_told_before_the_forward_pass(
    build: Build, batch: TokenBatch, weighted_nll: Any, raises: Raises
) -> None:
    with raises(UsageError, "advantages"):
        build().train_step(replace(batch, token_fields={}), weighted_nll)


def test_metrics_cover_the_step(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    metrics = build(microbatch_tokens=1).train_step(batch, weighted_nll)
    # 5 + 17 + 9 + 33 + 3 minus 5 first tokens, 3 of sequence 5, indices 3 6 9 12 15 18 of sequence 6
    assert metrics["global_valid_toks"].value == 62 + 3 + 6
    assert metrics["global_valid_seqs"].value == 7
    assert metrics["sequences"].value == 9
    assert metrics["lr"].value == 1e-2
    assert metrics["skipped_updates"].value == 0


@dataclass(frozen=True)
class Broken:
    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return policy_logprobs.sum() * torch.nan, {}


def test_a_gradient_that_is_not_finite_skips_the_update(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    broken, clean = build(), build()
    before = {name: p.detach().clone() for name, p in broken._trainable.items()}
    metrics = broken.train_step(batch, Broken())
    assert metrics["skipped_updates"].value == 1
    assert math.isnan(metrics["grad_norm"].value)
    assert all(torch.equal(p, before[name]) for name, p in broken._trainable.items())
    broken.train_step(batch, weighted_nll)
    clean.train_step(batch, weighted_nll)
    assert all(torch.equal(p, clean._trainable[name]) for name, p in broken._trainable.items())


def test_a_batch_without_trained_tokens_does_not_fail(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    nothing = replace(batch, mask=torch.zeros_like(batch.mask), loss_weights=torch.zeros_like(batch.loss_weights))
    metrics = build().train_step(nothing, weighted_nll)
    assert metrics["loss"].value == metrics["grad_norm"].value == 0.0


def test_bfloat16_trains_with_float32_state(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    backend = build(precision="bfloat16", optimizer={"lr": 1e-5}, microbatch_tokens=40)
    masters = backend._optimizer._masters  # type: ignore[union-attr]
    before = {name: master.detach().clone() for name, master in masters.items()}
    losses = [backend.train_step(batch, weighted_nll)["loss"].value for _ in range(3)]
    assert all(map(math.isfinite, losses))
    assert all(p.dtype == torch.bfloat16 for p in backend._trainable.values())
    # 1e-5 is below bfloat16's resolution near 1, but the masters keep it.
    assert all(m.dtype == torch.float32 and not torch.equal(m, before[name]) for name, m in masters.items())
    assert all(torch.equal(p, masters[name].bfloat16()) for name, p in backend._trainable.items())


def test_training_lowers_the_loss(build: Build, batch: TokenBatch, weighted_nll: Any) -> None:
    backend = build(lora={"rank": 4, "dropout": 0.1})
    likelier = batch.with_tokens(advantages=torch.ones(batch.num_tokens))
    losses = [backend.train_step(likelier, weighted_nll)["loss"].value for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        # warm-up 2 of 6 steps, floor 0.1: linear falls by 0.9 / 4 a step
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        # 0.1 + 0.9 * (1 + cos(pi * x)) / 2 at x = 1/4, 1/2, 3/4, 1
        ("cosine", [0.0, 0.5, 1.0, 0.8681981, 0.55, 0.2318019, 0.1, 0.1]),
    ],
)
def test_schedules_warm_up_and_fall_to_the_floor(kind: Any, factors: list[float]) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=2, decay_steps=6, min_lr_frac=0.1)
    assert [schedule_factor(schedule, step) for step in range(1, 9)] == pytest.approx(factors)


def test_a_decay_without_an_end_is_refused(build: Build, raises: Raises) -> None:
    with raises(BackendError, "decay_steps"):
        build(schedule={"kind": "cosine"})


def test_the_learning_rate_follows_the_schedule(
    build: Build, batch: TokenBatch, weighted_nll: Callable[..., Any]
) -> None:
    backend = build(schedule={"kind": "linear", "warmup_steps": 2, "decay_steps": 4})
    rates = [backend.train_step(batch, weighted_nll)["lr"].value for _ in range(4)]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.005])


@dataclass(frozen=True)
class _Faulty:
    """A loss that fails in its forward or in its backward pass."""

    backward: bool
    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        if not self.backward:
            raise ZeroDivisionError("no advantages")
        ratio = outputs.exp()
        total = (ratio * ratio).sum()
        ratio += 1.0  # autograd needs the value that this overwrites
        return total, {}


@pytest.mark.parametrize(("backward", "error"), [(False, "ZeroDivisionError"), (True, "RuntimeError")])
def test_an_error_in_a_loss_names_the_loss(build: Build, backward: bool, error: str, raises: Raises) -> None:
    batch = TokenBatch.from_sequences([[1, 2, 3]], [[False, True, True]])
    with raises(ForeignError, "_Faulty", error):
        build().train_step(batch, _Faulty(backward))


def no_room(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_no_room_for_a_microbatch_is_told_with_a_smaller_one(
    build: Build, batch: TokenBatch, weighted_nll: Any, raises: Raises, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = build(microbatch_tokens=4096)
    monkeypatch.setattr(backend._scorer.decoder, "forward", no_room)
    with raises(DeviceMemoryError, 4096, 2048):
        backend.train_step(batch, weighted_nll)
    with raises(DeviceMemoryError, 4096, 2048):
        backend.get_logprobs(batch)


def test_no_room_for_the_optimizer_is_not_blamed_on_microbatches(
    build: Build, batch: TokenBatch, weighted_nll: Any, raises: Raises, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = build()
    monkeypatch.setattr(torch.optim.AdamW, "step", no_room)
    with raises(BackendError, "optimizer"):
        backend.train_step(batch, weighted_nll)


def test_no_room_for_the_model_is_told_as_such(build: Build, raises: Raises, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.to", no_room)
    with raises(DeviceMemoryError):
        build()
