"""Checks of weight transports: what is published is what is fetched."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping

import torch
from nemorl.weights import IN_PROCESS, Distance, Export, WeightHandle
from nemorl_rl.serving.receipts import Sent, compare
from nemorl_tensors.engines.digests import digested, digests
from torch import Tensor

from nemorl_testing.kit import NotApplicable, Subject, expect

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def check_what_is_published_is_fetched(subject: Subject) -> None:
    """Every tensor arrives with its name, dtype, shape and bytes, also odd sizes, scalars and views. (DESIGN 5)"""
    sent = _tensors(seed=1)
    for arrived in _round_trips(subject, [sent]):
        expect(sent.keys() == arrived.keys(), f"sent {sorted(sent)}, fetched {sorted(arrived)}")
        for name, tensor in sent.items():
            found = arrived[name]
            same = (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and torch.equal(found, tensor)
            expect(same, f"{name}: sent {tensor}, fetched {found}")


def check_the_version_before_stays_valid(subject: Subject) -> None:
    """Publishing a version leaves the one before it readable: a generator may still be using it. (DESIGN 5)"""
    if subject.name == IN_PROCESS:
        raise NotApplicable("in_process hands over the live tensors: there is one version, the current one")
    first, second = _tensors(seed=1), _tensors(seed=2)
    old, new = _round_trips(subject, [first, second])
    expect(torch.equal(old["odd.float32"], first["odd.float32"]), "the first version changed when the second came")
    expect(torch.equal(new["odd.float32"], second["odd.float32"]), "the second version is not what was published")


def check_a_payload_can_be_sent(subject: Subject) -> None:
    """What ``publish`` returns is picklable, unless both ends share a process. (DESIGN 5)"""
    reach: Distance = subject.config.reach  # type: ignore[attr-defined]
    if reach == "process":
        raise NotApplicable("both ends share a process")
    sender = subject.config.build()  # type: ignore[call-arg]
    handle = WeightHandle(subject.name, 1, sender.publish(_export(_tensors(seed=1))))
    pickle.dumps(handle)
    sender.close()


def check_what_arrives_has_the_digests_that_were_sent(subject: Subject) -> None:
    """Digests of what is fetched are those of what was published: of two versions in turn no tensor is dropped, stale,
    swapped with another or cut short. (DESIGN 7.8)"""
    sender, receiver = subject.config.build(), subject.config.build()  # type: ignore[call-arg]
    before: list[Sent] = []
    for version in (1, 2):
        tensors = _model(seed=version)
        export, sent = digested(_export(tensors))
        payload = sender.publish(export)
        arrived = {name: tensor for bucket in receiver.fetch(payload) for name, tensor in bucket.items()}
        found = compare(Sent(version, dict(sent)), [digests(arrived)], before)
        before.append(Sent(version, dict(sent)))
        expect(not found.faults and found.proven == len(tensors), f"version {version}: {dict(found.faults)}")
    sender.close()
    receiver.close()


def _model(seed: int) -> dict[str, Tensor]:
    """Tensors as a model has them: layers alike, experts, a head of its own, adapters over a base."""
    generator = torch.Generator().manual_seed(seed)
    names = ("embed", "layers.0.q", "layers.1.q", "experts.0", "experts.1", "base", "lora_A", "lora_B", "lm_head")
    return {name: torch.randn(4, 6, generator=generator) for name in names}


def _round_trips(subject: Subject, versions: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Publish each, then fetch each, and only then read."""
    sender, receiver = subject.config.build(), subject.config.build()  # type: ignore[call-arg]
    payloads = [sender.publish(_export(tensors)) for tensors in versions]
    arrived = [
        {name: tensor for bucket in receiver.fetch(payload) for name, tensor in bucket.items()} for payload in payloads
    ]
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in arrived]
    sender.close()
    receiver.close()
    return copies


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {f"odd.{dtype}".replace("torch.", ""): _random(dtype, (3, 5), generator) for dtype in DTYPES}
    found["scalar"] = _random(torch.float32, (), generator)
    found["empty"] = torch.empty(0, 4)
    found["view"] = _random(torch.float32, (4, 6), generator).t()[1:]
    return found


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def _export(tensors: Mapping[str, Tensor]) -> Export:
    names = list(tensors)
    half = len(names) // 2

    def export() -> Iterator[Mapping[str, Tensor]]:
        yield {name: tensors[name] for name in names[:half]}
        yield {name: tensors[name] for name in names[half:]}

    return export
