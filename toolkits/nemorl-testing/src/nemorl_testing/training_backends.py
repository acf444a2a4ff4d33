"""Checks of training backends: what they compute is what plain transformers and AdamW compute, however they batch it.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from nemorl.contracts import Loss, TrainingBackend
from nemorl.contracts.memory import MemoryPart, OffloadingBackend
from nemorl.errors import NemorlError
from nemorl.metrics import Sum
from torch import Tensor

from nemorl_testing.backends import (
    build_trainer,
    difference,
    expect_close,
    files_below,
    model_folder,
    norm,
    reference,
    weights_of,
)
from nemorl_testing.batches import Counted, Demanding, NotFinite, RatioProbe, Selective, WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.models import load_reference, plain_logprobs, tiny_model

LINEAR: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}
"""AdamW whose first update is g / (|g| + 1): it shows the gradient, where the usual eps shows its sign."""
UPDATE_TOLERANCE = 2e-5
"""Largest allowed error of an update, relative to its norm: float32 sums in another order."""
REFERENCE_TOLERANCE = 5e-4
"""The same against plain transformers, whose kernels differ."""


def check_logprobs_equal_transformers(subject: Subject) -> None:
    """get_logprobs is the log-softmax of the plain model at index t for token t, in float32. (DESIGN 7.2)"""
    batch = ragged_batch()
    found = build_trainer(subject).get_logprobs(batch)
    expect(found.dtype == torch.float32 and not found.requires_grad, f"got {found.dtype}, grad={found.requires_grad}")
    expect_close(found, _plain(subject, batch), subject.settings.tolerance, "a log-prob")


def check_temperature_divides_the_logits(subject: Subject) -> None:
    """Log-probs are those of softmax(logits / temperature), in scoring and in the loss. (DESIGN 7.2)"""
    backend, batch = build_trainer(subject), ragged_batch(temperature=0.6)
    found = backend.get_logprobs(batch)
    expect_close(found, _plain(subject, batch), subject.settings.tolerance, "a log-prob at temperature 0.6")
    # A temperature that the loss did not see changes ratios by far more than this.
    _expect_ratio_one(backend, batch.with_tokens(old_logprobs=found.cpu()), subject.settings.tolerance)


def check_masked_and_first_tokens_score_zero(subject: Subject) -> None:
    """Log-probs are 0.0 where the mask is False, and at every sequence's first token. (DESIGN 7.2)"""
    backend, batch = build_trainer(subject), ragged_batch()
    found = backend.get_logprobs(batch).cpu()
    expect(bool((found[~batch.mask] == 0).all()), f"masked tokens score {found[~batch.mask].tolist()}")
    everything = replace(batch, mask=torch.ones_like(batch.mask))
    first = backend.get_logprobs(everything).cpu()[torch.cumsum(batch.lengths, 0) - batch.lengths]
    expect(bool((first == 0).all()), f"first tokens score {first.tolist()}")


def check_on_policy_ratio_is_one(subject: Subject) -> None:
    """Before an update, the loss sees the very log-probs that get_logprobs returns. (DESIGN 7.12)"""
    backend, batch = build_trainer(subject), ragged_batch()
    _expect_ratio_one(backend, batch.with_tokens(old_logprobs=backend.get_logprobs(batch).cpu()), 1e-6)


def check_one_step_equals_transformers_and_adamw(subject: Subject) -> None:
    """A step is the gradient of the loss as given, nothing rescaled, and one AdamW update. (DESIGN 7.5)"""
    _require_full_training(subject)
    update, metrics = _update(subject)
    wanted, _, loss = _plain_step(model_folder(subject))
    _expect_update(update, wanted, REFERENCE_TOLERANCE)
    expect(isinstance(metrics["loss"], Sum), f"the metric loss is {metrics['loss']!r}, not a Sum")
    expect(math.isclose(metrics["loss"].value, loss, rel_tol=1e-3), f"loss {metrics['loss'].value}, expected {loss}")
    expect(metrics["lr"].value == LINEAR["lr"], f"lr is reported as {metrics['lr'].value}, not {LINEAR['lr']}")


def check_gradient_is_clipped_and_its_norm_reported(subject: Subject) -> None:
    """The gradient is clipped to max_grad_norm, if that is set; ``grad_norm`` is its norm before that. (DESIGN 5)"""
    _require_full_training(subject)
    limit = _plain_step(model_folder(subject))[1] / 4
    update, metrics = _update(subject, max_grad_norm=limit)
    wanted, grad_norm, _ = _plain_step(model_folder(subject), limit)
    seen = metrics["grad_norm"].value
    expect(math.isclose(seen, grad_norm, rel_tol=1e-3), f"grad_norm is {seen}, expected {grad_norm}")
    _expect_update(update, wanted, REFERENCE_TOLERANCE)
    unclipped, metrics = _update(subject, max_grad_norm=None)
    seen = metrics["grad_norm"].value
    expect(math.isclose(seen, grad_norm, rel_tol=1e-3), f"grad_norm without a limit is {seen}, expected {grad_norm}")
    _expect_update(unclipped, _plain_step(model_folder(subject))[0], REFERENCE_TOLERANCE)


def check_microbatching_changes_nothing(subject: Subject) -> None:
    """The update does not depend on microbatch_tokens. (DESIGN 7.5)"""
    whole, metrics = _update(subject, microbatch_tokens=100_000)
    for tokens in (1, 40):
        split, others = _update(subject, microbatch_tokens=tokens)
        _expect_update(split, whole, UPDATE_TOLERANCE)
        one, other = metrics["loss"].value, others["loss"].value
        expect(math.isclose(one, other, rel_tol=1e-4), f"loss is {one} in one microbatch, {other} in several")


def check_order_of_sequences_is_irrelevant(subject: Subject) -> None:
    """Results come back in the batch's order, and the update does not depend on it. (DESIGN 7.1)"""
    batch = ragged_batch()
    order = [3, 8, 0, 6, 1, 7, 5, 2, 4]
    turned = batch.select(order)
    backend = build_trainer(subject)
    marked = batch.with_tokens(found=backend.get_logprobs(batch).cpu()).select(order)
    expect_close(backend.get_logprobs(turned), marked["found"], 1e-5, "a log-prob of the reordered batch")
    _expect_update(_update(subject, turned)[0], _update(subject, batch)[0], UPDATE_TOLERANCE)


def check_garbage_in_masked_fields_changes_nothing(subject: Subject) -> None:
    """NaN and infinity in masked-out slots of a field reach neither loss nor gradient. (DESIGN 7.6)"""
    batch = ragged_batch()
    clean, metrics = _update(subject, batch)
    for garbage in (torch.nan, torch.inf):
        spoilt = batch.with_tokens(advantages=torch.where(batch.mask, batch["advantages"], garbage))
        dirty, others = _update(subject, spoilt)
        _expect_update(dirty, clean, UPDATE_TOLERANCE)
        expect(math.isfinite(others["loss"].value), f"loss is {others['loss'].value}, was {metrics['loss'].value}")


def check_batch_with_nothing_to_train_is_harmless(subject: Subject) -> None:
    """A shard in which no token is trained on changes no weight and raises nothing. (DESIGN 7.5)"""
    batch = ragged_batch()
    nothing = torch.zeros_like(batch.mask)
    update, metrics = _update(subject, replace(batch, mask=nothing, loss_weights=nothing.float()))
    expect(norm(update) == 0, f"weights moved by {norm(update)}")
    expect(metrics["loss"].value == 0, f"loss is {metrics['loss'].value}")


def check_sequences_without_gradient_still_count(subject: Subject) -> None:
    """Sequences whose gradient a loss says is 0 keep their weight and their part in every metric. (DESIGN 7.5)"""
    batch = ragged_batch()
    teaches = torch.tensor([index % 3 == 0 for index in range(len(batch))])[batch.sequence_ids]
    batch = batch.with_tokens(advantages=torch.where(teaches, batch["advantages"], 0.0))
    wanted, all_backward = _update(subject, batch, Counted(), microbatch_tokens=40)
    found, metrics = _update(subject, batch, Selective(), microbatch_tokens=40)
    _expect_update(found, wanted, UPDATE_TOLERANCE)
    for name in ("seen", "logprob", "loss", "grad_norm", "global_valid_toks", "global_valid_seqs"):
        one, other = all_backward[name].value, metrics[name].value
        expect(math.isclose(one, other, rel_tol=1e-4), f"{name} is {other}, and {one} if all get a backward pass")


def check_missing_loss_field_is_named(subject: Subject) -> None:
    """A field that the loss declares and the batch lacks is an error that names it, before any change. (DESIGN 7.4)"""
    backend = build_trainer(subject)
    before = weights_of(backend)
    try:
        backend.train_step(ragged_batch(), Demanding())
    except NemorlError as error:
        expect("a_field_nobody_made" in str(error), f"the error does not name the field: {error}")
    else:
        expect(False, "train_step accepted a batch that lacks a_field_nobody_made")
    expect(norm(difference(weights_of(backend), before)) == 0, "the weights moved")


def check_gradient_that_is_not_finite_skips_the_update(subject: Subject) -> None:
    """A gradient norm of NaN changes no weight, counts in ``skipped_updates``, and the next step works. (DESIGN 5)"""
    backend, batch = build_trainer(subject, optimizer=LINEAR), ragged_batch()
    before = weights_of(backend)
    metrics = backend.train_step(batch, NotFinite())
    expect(metrics["skipped_updates"].value == 1, f"skipped_updates is {metrics['skipped_updates']}")
    expect(norm(difference(weights_of(backend), before)) == 0, "the weights moved")
    backend.train_step(batch, WeightedNLL())
    moved = norm(difference(weights_of(backend), before))
    expect(0 < moved < math.inf, f"the step after moved the weights by {moved}")


def check_continuing_from_a_checkpoint_changes_nothing(subject: Subject) -> None:
    """save, load into a fresh backend, continue: the same weights and metrics, bit for bit on CPU. (DESIGN 7.9)"""
    settings: dict[str, Any] = {
        "schedule": {"kind": "linear", "warmup_steps": 2, "decay_steps": 6},
        "optimizer": {"lr": 1e-2},
    }
    batches = [ragged_batch(seed=seed) for seed in range(4)]
    straight, folder = build_trainer(subject, **settings), subject.folder / "checkpoint"
    folder.mkdir()
    for batch in batches[:2]:
        straight.train_step(batch, WeightedNLL())
    straight.save_checkpoint(folder)
    wrong = [path.name for path in files_below(folder) if path.suffix not in (".safetensors", ".json")]
    expect(not wrong, f"the checkpoint holds {', '.join(wrong)}: only safetensors and JSON can be read without risk")
    _expect_readable(folder)
    wanted = [straight.train_step(batch, WeightedNLL()) for batch in batches[2:]]
    weights = weights_of(straight)
    straight.shutdown()

    resumed = build_trainer(subject, seed=43, **settings)
    resumed.load_checkpoint(folder)
    found = [resumed.train_step(batch, WeightedNLL()) for batch in batches[2:]]
    exact = subject.settings.device == "cpu"
    gap = difference(weights_of(resumed), weights)
    worst = max(gap, key=lambda name: float(gap[name].abs().max()))
    limit = 0.0 if exact else UPDATE_TOLERANCE * norm(weights)
    expect(norm(gap) <= limit, f"weights differ, most in {worst} by {float(gap[worst].abs().max()):.3g}")
    for name in ("loss", "grad_norm", "lr"):
        one, other = ([metrics[name].value for metrics in run] for run in (wanted, found))
        same = one == other if exact else all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-4), one, other))
        expect(same, f"{name} is {other} after the load, {one} without")


def check_a_checkpoint_without_optimizer_begins_a_new_one(subject: Subject) -> None:
    """save_checkpoint(optimizer=False) writes less, and what loads it steps as a new optimizer does. (DESIGN 7.9)"""
    if "weights_only_checkpoint" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'weights_only_checkpoint'}")
    if subject.settings.policy.get("lora"):
        raise NotApplicable("new adapters on the exported model are not those of the checkpoint")
    batch, folders = ragged_batch(), [subject.folder / name for name in ("whole", "weights_only")]
    straight = build_trainer(subject, optimizer={"lr": 1e-2})
    for _ in range(2):
        straight.train_step(batch, WeightedNLL())
    for folder, optimizer in zip(folders, (True, False), strict=True):
        folder.mkdir()
        straight.save_checkpoint(folder, optimizer=optimizer)
    whole, bare = (sum(path.stat().st_size for path in files_below(folder)) for folder in folders)
    expect(bare < 0.6 * whole, f"it takes {bare} bytes without optimizer, {whole} with it")
    straight.save_pretrained(subject.folder / "model")
    straight.shutdown()

    new = build_trainer(subject, optimizer={"lr": 1e-2}, init="pretrained", model_name=str(subject.folder / "model"))
    new.train_step(batch, WeightedNLL())
    wanted = weights_of(new)
    new.shutdown()
    resumed = build_trainer(subject, seed=43, optimizer={"lr": 1e-2})
    resumed.load_checkpoint(folders[1])
    before = weights_of(resumed)
    resumed.train_step(batch, WeightedNLL())
    _expect_update(difference(weights_of(resumed), before), difference(wanted, before), REFERENCE_TOLERANCE)


def check_reference_stays_frozen(subject: Subject) -> None:
    """Reference log-probs are those of the initial weights, however far the policy has moved. (DESIGN 7.3)"""
    if "reference" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'reference'}")
    backend, batch = build_trainer(subject, reference=True), ragged_batch()
    start = backend.get_logprobs(batch).cpu()
    expect_close(backend.get_logprobs(batch, "reference"), start, 1e-6, "a reference log-prob before training")
    for _ in range(2):
        backend.train_step(batch, WeightedNLL())
    moved = float((backend.get_logprobs(batch).cpu() - start).abs().max())
    expect(moved > 1e-3, f"two steps moved the policy's log-probs by {moved} only: this check proves nothing")
    expect_close(backend.get_logprobs(batch, "reference"), start, 1e-6, "a reference log-prob after two steps")


def check_reference_must_be_asked_for(subject: Subject) -> None:
    """Without ``reference=True``, asking for reference log-probs is an error, not the policy's. (DESIGN 5)"""
    backend = build_trainer(subject, reference=False)
    try:
        backend.get_logprobs(ragged_batch(), "reference")
    except NemorlError:
        return
    expect(False, "reference log-probs were returned by a backend that keeps no reference")


def check_export_is_the_model(subject: Subject) -> None:
    """export_weights yields the trained policy under Hugging Face names, its head tied or not. (DESIGN 5)"""
    folders = [model_folder(subject)]
    if subject.settings.model is None:
        folders.append(str(tiny_model(tie_word_embeddings=False)))
    for folder in folders:
        backend, batch = build_trainer(subject, model_name=folder), ragged_batch()
        weights_of(backend)  # what is exported before the step must not be what is exported after it
        backend.train_step(batch, WeightedNLL())
        model, weights = load_reference(folder), weights_of(backend)
        strange = set(weights) - set(model.state_dict())
        expect(not strange, f"exported names that {type(model).__name__} lacks: {sorted(strange)[:5]}")
        missing = {name for name, _ in model.named_parameters()} - set(weights)
        expect(not missing, f"parameters that are not exported: {sorted(missing)[:5]}")
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        found = plain_logprobs(model, batch).detach()
        expect_close(found, backend.get_logprobs(batch), subject.settings.tolerance, "a log-prob of the export")


def check_save_pretrained_loads_with_transformers(subject: Subject) -> None:
    """save_pretrained writes a folder that transformers loads: config, safetensors, tokenizer. (DESIGN 5)"""
    from transformers import AutoTokenizer

    backend, batch, folder = build_trainer(subject), ragged_batch(), subject.folder / "model"
    backend.train_step(batch, WeightedNLL())
    backend.save_pretrained(folder)
    pickled = [path.name for path in files_below(folder) if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    expect(not pickled, f"the folder holds pickles: {', '.join(pickled)}")
    found = plain_logprobs(load_reference(folder), batch).detach()
    expect_close(found, backend.get_logprobs(batch), subject.settings.tolerance, "a log-prob of the saved model")
    ids = AutoTokenizer.from_pretrained(folder)("1+1=")["input_ids"]
    expect(ids == AutoTokenizer.from_pretrained(model_folder(subject))("1+1=")["input_ids"], f"'1+1=' is now {ids}")


def check_what_leaves_the_device_comes_back_unchanged(subject: Subject) -> None:
    """After offload and onload a step is the same, byte for byte; a part that is away holds no memory. (DESIGN 5)"""
    if "offload" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'offload'}")
    moving, staying = build_trainer(subject), build_trainer(subject)
    for backend in (moving, staying):
        backend.train_step(ragged_batch(), WeightedNLL())
    expect(isinstance(moving, OffloadingBackend), "the backend has no offload, onload and held_bytes")
    assert isinstance(moving, OffloadingBackend)
    parts: list[MemoryPart] = ["gradients", "optimizer", "reference", "weights"]
    before = moving.held_bytes()
    expect(before["weights"] > 0 and before["optimizer"] > 0, f"after a step it holds {dict(before)}")
    for _ in range(2):  # the second time nothing is left to move
        moving.offload(parts)
    away = moving.held_bytes()
    expect(not any(away.values()), f"it still holds {dict(away)} bytes of what it was told to offload")
    for _ in range(2):
        moving.onload(["weights"])
    found, wanted = moving.get_logprobs(ragged_batch()), staying.get_logprobs(ragged_batch())
    expect(torch.equal(found, wanted), "log-probs differ once the weights are back")
    moving.onload(parts)
    expect(moving.held_bytes() == before, f"it holds {dict(moving.held_bytes())} bytes, and held {dict(before)}")
    for backend in (moving, staying):
        backend.train_step(ragged_batch(), WeightedNLL())
    gap = difference(weights_of(moving), weights_of(staying))
    changed = [name for name, tensor in gap.items() if bool((tensor != 0).any())]
    expect(not changed, f"the next step differs in {', '.join(changed[:3])}")


def check_shutdown_twice_is_harmless(subject: Subject) -> None:
    """The backend has every verb of its contract, and a second shutdown does nothing. (DESIGN 5)"""
    backend = build_trainer(subject)
    expect(isinstance(backend, TrainingBackend), f"{type(backend).__name__} lacks a verb of TrainingBackend")
    backend.shutdown()
    backend.shutdown()


def _plain(subject: Subject, batch: Any) -> Tensor:
    return plain_logprobs(reference(model_folder(subject)), batch).detach()


def _expect_ratio_one(backend: TrainingBackend, batch: Any, tolerance: float) -> None:
    error = backend.train_step(batch, RatioProbe())["ratio_error"].value
    expect(error <= tolerance, f"the ratio is up to {error:.3g} away from 1")


def _update(
    subject: Subject, batch: Any = None, loss: Loss | None = None, **policy: Any
) -> tuple[dict[str, Tensor], Any]:
    """Change of the weights by one step of a fresh backend, and its metrics."""
    if subject.settings.policy.get("precision", "float32") != "float32":
        raise NotApplicable("updates are compared in float32: rounded weights hide their differences")
    backend = build_trainer(subject, optimizer=LINEAR, **policy)
    before = weights_of(backend)
    metrics = backend.train_step(ragged_batch() if batch is None else batch, loss or WeightedNLL())
    update = difference(weights_of(backend), before)
    backend.shutdown()
    return update, metrics


def _require_full_training(subject: Subject) -> None:
    if subject.settings.policy.get("lora"):
        raise NotApplicable("the plain step trains all weights, and these settings adapters")


@cache
def _plain_step(folder: str, max_norm: float = 1e6) -> tuple[dict[str, Tensor], float, float]:
    """The same with nothing but transformers and PyTorch: update, gradient norm before clipping, loss."""
    model, batch = load_reference(folder), ragged_batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss, _ = WeightedNLL()(plain_logprobs(model, batch), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    torch.optim.AdamW(model.parameters(), **LINEAR).step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}, grad_norm, float(loss.detach())


def _expect_update(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    gap = difference({name: found[name] for name in wanted if name in found}, wanted)
    error, size = norm(gap), norm(wanted)
    worst = max(gap, key=lambda name: float(gap[name].double().square().sum()))
    expect(size > 0, "the expected update is zero: this check proves nothing")
    expect(error <= tolerance * size, f"the update is off by {error / size:.3g} of its norm, most in {worst}")


def _expect_readable(folder: Any) -> None:
    from safetensors import safe_open

    for path in files_below(folder):
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, framework="pt") as file:
                expect(list(file.keys()), f"{path.name} holds no tensor")
