"""Checks of engines that prove what they hold (capability ``receipts``): faults are planted on the way to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from nemorl.contracts import GenerationBackend
from nemorl.errors import BackendError
from nemorl.weights import Digests, WeightHandle, in_process_handle
from nemorl_rl.serving.receipts import Receipt, Sent, compare
from nemorl_tensors.engines.digests import digests
from torch import Tensor

from nemorl_testing.backends import build_generator, model_folder, other_model, require_in_process
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.models import load_reference

Tensors = Mapping[str, Tensor]


def check_a_receipt_is_of_the_weights_at_hand(subject: Subject) -> None:
    """held_digests says of every tensor that it is as it was sent, or why that cannot be told, after each update.
    (DESIGN 7.8)"""
    _require_receipts(subject)
    old, new = _weights(subject)
    engine = build_generator(subject, receipted(old, 1))
    for version, tensors in ((2, new), (3, old)):
        engine.update_weights(receipted(tensors, version), version)
        receipt = receipt_of(engine, tensors, version)
        expect(not receipt.faults, f"all arrived, and the receipt says: {dict(receipt.faults)}")
        expect(receipt.proven > 0, f"no tensor has a digest: {dict(receipt.incomparable)}")


def check_a_receipt_names_what_is_not_as_sent(subject: Subject) -> None:
    """Tensors that arrive stale, swapped or cut short are those that the receipt names, and no others; one that does
    not arrive is named by the receipt or by the error that refuses the update. (DESIGN 7.8)"""
    _require_receipts(subject)
    old, new = _weights(subject)
    engine = build_generator(subject, receipted(old, 1))
    engine.update_weights(receipted(new, 2), 2)
    told = receipt_of(engine, new, 2)
    comparable = [name for name in new if name not in told.incomparable]
    for number, (what, arriving) in enumerate(planted(old, new, comparable), start=3):
        engine.update_weights(receipted(new, number, arriving), number)
        found = set(receipt_of(engine, new, number, [Sent(1, digests(old))]).faults)
        meant = {name for name in new if not torch.equal(arriving[name], new[name])}
        expect(found == meant, f"{what}: {sorted(meant)}, and the receipt names {sorted(found)}")
    lost = next(name for name in comparable if new[name].ndim == 2)
    arriving = {name: tensor for name, tensor in new.items() if name != lost}
    engine.update_weights(receipted(old, 8), 8)
    try:
        engine.update_weights(receipted(new, 9, arriving), 9)
    except BackendError:
        return
    found = set(receipt_of(engine, new, 9).faults)
    expect(lost in found, f"{lost} did not arrive, and the receipt names {sorted(found)}")


def receipted(sent: Tensors, version: int, arriving: Tensors | None = None) -> WeightHandle:
    """A handle with the digests of tensors, over which others arrive."""

    def export() -> Iterator[Tensors]:
        yield sent if arriving is None else arriving

    return replace(in_process_handle(export, version), digests=Digests(digests(sent)))


def receipt_of(engine: GenerationBackend, sent: Tensors, version: int, before: Iterable[Sent] = ()) -> Receipt:
    """What an engine says of tensors that it was sent."""
    held = engine.held_digests(list(sent))  # type: ignore[attr-defined]
    return compare(Sent(version, digests(sent)), [held], before)


def planted(old: Tensors, new: Tensors, among: list[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Faults among some tensors: what each is, and what arrives in place of the new weights."""
    matrices = [name for name in among if new[name].ndim == 2]
    first = matrices[-1]
    yield "stale", {**new, first: old[first]}
    one, other = next(
        (a, b) for a in matrices for b in matrices if a < b and new[a].shape == new[b].shape and "layers" in a
    )
    yield "swapped", {**new, one: new[other], other: new[one]}
    cut = new[matrices[1]].detach().clone()
    cut[len(cut) // 2 :] = 0
    yield "cut short", {**new, matrices[1]: cut}


def _weights(subject: Subject) -> tuple[Tensors, Tensors]:
    models = load_reference(model_folder(subject)), other_model(subject)
    old, new = ({name: p.detach() for name, p in model.named_parameters()} for model in models)
    return old, new


def _require_receipts(subject: Subject) -> None:
    if "receipts" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'receipts'}")
    require_in_process(subject)
