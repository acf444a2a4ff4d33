"""Checks of a training backend that trains several adapters on one base (capability ``shared_base``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nemorl.contracts import AdamStep, AdapterBackend, AdapterShape, HalvedSteps, SharedBase, TrainingBackend
from nemorl.errors import NemorlError
from torch import Tensor

from nemorl_testing.backends import build_trainer
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

RANK = 4
SHAPES = {"one": AdapterShape(rank=2, alpha=8.0, seed=1), "two": AdapterShape(rank=RANK, seed=2)}
ADAM = AdamStep(lr=1e-2, weight_decay=0.1)


class _Backend(TrainingBackend, AdapterBackend, HalvedSteps, SharedBase):
    """A backend with all of these protocols."""


def check_adapters_that_take_turns_learn_as_alone(subject: Subject) -> None:
    """Gradients and updates of two adapters interleave; each is, bit for bit, what it is without the other.
    (DESIGN 9)"""
    alone = {}
    for name in SHAPES:
        backend = _backend(subject, [name])
        alone[name] = _learned(backend, [name])[name]
    found = _learned(_backend(subject, [*SHAPES]), [*SHAPES])
    for name in SHAPES:
        expect(found[name].keys() == alone[name].keys(), f"{name} has other tensors beside another one")
        error = max(float((found[name][key] - tensor).abs().max()) for key, tensor in alone[name].items())
        expect(error == 0.0, f"{name} is {error:.3g} off when another one learns beside it")


def check_a_new_adapter_says_what_the_base_says(subject: Subject) -> None:
    """After others have learnt, one that is added leaves the base model as it is. (DESIGN 9)"""
    backend = _backend(subject, ["one"])
    untrained = backend.get_logprobs(ragged_batch())
    backend.use_adapter("one")
    backend.train_step(ragged_batch(), WeightedNLL())
    backend.add_adapter("two", SHAPES["two"])
    backend.use_adapter("two")
    expect(torch.equal(backend.get_logprobs(ragged_batch()), untrained), "its log-probs are not the base's")


def check_an_adapter_that_is_removed_is_gone(subject: Subject) -> None:
    """A name that was removed is refused, and one added under it begins anew. (DESIGN 9)"""
    backend = _backend(subject, ["one"])
    untrained = backend.get_logprobs(ragged_batch())
    backend.use_adapter("one")
    backend.train_step(ragged_batch(), WeightedNLL())
    backend.remove_adapter("one")
    try:
        backend.use_adapter("one")
    except NemorlError:
        pass
    else:
        expect(False, "it can still be used")
    backend.add_adapter("one", SHAPES["one"])
    backend.use_adapter("one")
    expect(torch.equal(backend.get_logprobs(ragged_batch()), untrained), "it remembers what it had learnt")


def _backend(subject: Subject, names: Sequence[str]) -> _Backend:
    if "shared_base" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'shared_base'}")
    backend: Any = build_trainer(subject, lora={"rank": RANK})
    for name in names:
        backend.add_adapter(name, SHAPES[name])
    return backend  # type: ignore[no-any-return]


def _learned(backend: _Backend, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
    """Their factors after two updates each, of two passes each."""
    for step in range(2):
        for part in (0, 1):
            for name in names:
                backend.use_adapter(name)
                batch = ragged_batch(seed=10 * step + part + len(SHAPES) * [*SHAPES].index(name))
                backend.forward_backward(batch, WeightedNLL())
        for name in reversed(names):
            backend.use_adapter(name)
            backend.optimizer_step(ADAM)
    found = {}
    for name in names:
        backend.use_adapter(name)
        found[name] = {key: tensor.clone() for bucket in backend.export_adapters() for key, tensor in bucket.items()}
    return found
