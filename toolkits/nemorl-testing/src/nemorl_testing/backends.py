"""Building the backend under test on the tiny model, and reading its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.contracts import GenerationBackend, TrainingBackend
from nemorl.resources.worker import WorkerContext
from nemorl.weights import IN_PROCESS, WeightHandle, in_process_handle
from torch import Tensor

from nemorl_testing.kit import NotApplicable, Subject, expect, partner_config
from nemorl_testing.models import load_reference, tiny_model

MAX_SEQUENCE_TOKENS = 128


def model_folder(subject: Subject) -> str:
    """The model that the backend is checked with."""
    return str(subject.settings.model or tiny_model())


@cache
def reference(folder: str) -> Any:
    """The model of a folder in plain transformers, loaded once. Nobody changes it."""
    return load_reference(folder)


def worker(subject: Subject, seed: int = 42) -> WorkerContext:
    among = subject.settings.ranks or WorkerContext()
    return replace(among, device=subject.settings.device, seed=seed, scratch=subject.folder)


def policy_config(subject: Subject, **changes: Any) -> PolicyConfig:
    """The policy of backend checks: float32, and no clipping unless a check asks for it."""
    backend: Any = subject.config
    if subject.kind != "training_backends":
        backend = partner_config("training_backends", subject.settings.partner or "dtensor")
    fields = {
        "model_name": model_folder(subject),
        "backend": backend,
        "max_grad_norm": 1e6,
        "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        **subject.settings.policy,
        **changes,
    }
    return PolicyConfig.model_validate(fields)


def build_trainer(subject: Subject, *, reference: bool = False, seed: int = 42, **policy: Any) -> TrainingBackend:
    """The training backend under test, or the partner of the generator under test."""
    subject.require_modules()
    config = policy_config(subject, **policy)
    return subject.own(config.backend.build(config, worker(subject, seed), reference=reference), "shutdown")


def build_generator(
    subject: Subject,
    weights: WeightHandle | None = None,
    options: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> GenerationBackend:
    """The generation backend under test, or the partner of the trainer under test, with other options of its own, for a
    policy with other fields."""
    subject.require_modules()
    return subject.own(_generator(subject, weights, options or {}, policy or {}), "shutdown")


def shared_generator(subject: Subject) -> GenerationBackend:
    """One generator with the weights on disk, for all checks that leave it as it is."""
    if "generator" not in subject.shared:
        subject.require_modules()
        subject.shared["generator"] = _generator(subject, None, {}, {})
    found: GenerationBackend = subject.shared["generator"]
    return found


def _generator(
    subject: Subject, weights: WeightHandle | None, options: Mapping[str, Any], policy: Mapping[str, Any]
) -> GenerationBackend:
    backend: Any = subject.config
    if subject.kind != "generation_backends":
        backend = partner_config("generation_backends", subject.settings.partner or "hf")
    generation = GenerationConfig.model_validate(
        {"backend": backend.model_copy(update=options), **subject.settings.generation}
    )
    return generation.backend.build(generation, policy_config(subject, **policy), worker(subject), weights)


def require_in_process(subject: Subject) -> None:
    """End the check where weights do not travel within the process."""
    if IN_PROCESS not in subject.config.weight_transports:
        names = ", ".join(subject.config.weight_transports)
        raise NotApplicable(f"{subject.name} takes weights by {names}; this check hands them over {IN_PROCESS}")


def other_model(subject: Subject) -> Any:
    """One with other weights, on the CPU."""
    if subject.settings.model is None:
        return load_reference(tiny_model(seed=8))
    model = load_reference(model_folder(subject))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    return model


def in_process_weights(model: Any, version: int) -> WeightHandle:
    """Its live parameters, handed over in process."""

    def export() -> Iterator[dict[str, torch.Tensor]]:
        yield dict(model.named_parameters())

    return in_process_handle(export, version)


def in_process_copies(model: Any, version: int) -> WeightHandle:
    """Copies of its parameters, handed over in process: the engine that takes them is their only holder."""

    def export() -> Iterator[dict[str, torch.Tensor]]:
        yield {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    return in_process_handle(export, version)


def weights_of(backend: TrainingBackend) -> dict[str, Tensor]:
    """A copy of what the backend exports now."""
    found: dict[str, Tensor] = {}
    for bucket in backend.export_weights():
        found.update({name: tensor.detach().float().cpu().clone() for name, tensor in bucket.items()})
    return found


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Global L2 norm."""
    return float(torch.stack([t.double().square().sum() for t in tensors.values()]).sum().sqrt())


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    expect(one.keys() == other.keys(), f"exported names differ: {sorted(one.keys() ^ other.keys())}")
    return {name: one[name] - other[name] for name in one}


def expect_close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Equal shapes, all finite, and no element further apart than ``tolerance``."""
    expect(found.shape == wanted.shape, f"{what} has shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    gap = (found.float().cpu() - wanted.float().cpu()).abs()
    if gap.numel():
        worst = int(torch.where(gap.isnan(), torch.inf, gap).argmax())
        seen = f"{found.flatten()[worst]:.7g} at index {worst}, expected {wanted.flatten()[worst]:.7g}"
        expect(bool((gap <= tolerance).all()), f"{what} is {seen} (tolerance {tolerance})")


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
