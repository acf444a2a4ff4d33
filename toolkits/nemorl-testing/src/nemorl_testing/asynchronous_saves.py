"""Checks of a training backend that writes checkpoints while it trains (capability ``asynchronous_checkpoint``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemorl.base.files.sealed_folders import digest
from nemorl.contracts import SnapshottingBackend, TrainingBackend

from nemorl_testing.backends import build_trainer, difference, files_below, norm, weights_of
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

SETTINGS: dict[str, Any] = {"optimizer": {"lr": 1e-2}}


def check_a_snapshot_is_of_the_step_it_was_taken_after(subject: Subject) -> None:
    """What trains on after snapshot_checkpoint changes nothing of what is being written. (DESIGN 7.9)"""
    backend, folder = _begun(subject)
    saved = weights_of(backend)
    wanted = backend.train_step(ragged_batch(seed=3), WeightedNLL())
    _files(backend, wait=True)
    backend.shutdown()
    resumed = build_trainer(subject, seed=43, **SETTINGS)
    resumed.load_checkpoint(folder)
    gap = norm(difference(weights_of(resumed), saved))
    expect(gap == 0, f"the weights that are loaded differ by {gap:.3g} from those of its step")
    found = resumed.train_step(ragged_batch(seed=3), WeightedNLL())
    if subject.settings.device == "cpu":
        pairs = [(metrics["loss"].value, metrics["grad_norm"].value) for metrics in (wanted, found)]
        expect(pairs[0] == pairs[1], f"loss and gradient of the next step are {pairs[1]} after a load, {pairs[0]} here")


def check_a_snapshot_is_named_when_it_is_whole(subject: Subject) -> None:
    """snapshot_files names what save_checkpoint writes, with digests, and nothing before it is whole. (DESIGN 7.9)"""
    backend, folder = _begun(subject)
    found = _files(backend, wait=False)
    if found is not None:
        _expect_whole(found, folder)
    at_once = subject.folder / "at_once"
    at_once.mkdir()
    backend.save_checkpoint(at_once)
    whole = found if found is not None else _files(backend, wait=True)
    expect(whole is not None, "it says, asked to wait, that it is still writing")
    assert whole is not None
    _expect_whole(whole, folder)
    names = {path.relative_to(at_once).as_posix() for path in files_below(at_once)}
    named = {Path(name).relative_to(folder).as_posix() for name in whole}
    expect(named == names, f"it names {sorted(named)}, a checkpoint has {sorted(names)}")


def _begun(subject: Subject) -> tuple[TrainingBackend, Path]:
    """A backend after two steps, of which a snapshot is being written, and the folder of that."""
    if "asynchronous_checkpoint" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'asynchronous_checkpoint'}")
    backend, folder = build_trainer(subject, **SETTINGS), subject.folder / "snapshot"
    expect(isinstance(backend, SnapshottingBackend), "the backend has no snapshot_checkpoint and snapshot_files")
    assert isinstance(backend, SnapshottingBackend)
    folder.mkdir()
    for seed in range(2):
        backend.train_step(ragged_batch(seed=seed), WeightedNLL())
    backend.snapshot_checkpoint(folder)
    return backend, folder


def _files(backend: TrainingBackend, *, wait: bool) -> dict[str, str] | None:
    assert isinstance(backend, SnapshottingBackend)
    found = backend.snapshot_files(wait=wait)
    return None if found is None else dict(found)


def _expect_whole(found: dict[str, str], folder: Path) -> None:
    present = {str(path) for path in files_below(folder)}
    expect(present == found.keys(), f"it names {sorted(found)}, {folder} has {sorted(present)}")
    wrong = [name for name, recorded in found.items() if digest(Path(name)) != recorded]
    expect(not wrong, f"the digest of {', '.join(wrong)} is that of other content")
