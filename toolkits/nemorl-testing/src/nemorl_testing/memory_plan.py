"""Checks of a training backend that describes itself to planners (``nemorl_rl.planning.memory``)."""

from __future__ import annotations

from dataclasses import replace

from nemorl.contracts.memory import OffloadingBackend
from nemorl_rl.models.model_files import stored_config
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory.describing import PlansTraining
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import total

from nemorl_testing.backends import build_trainer, model_folder, policy_config
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

TOLERANCE_FRAC = 0.02
BUFFERS = 4096
"""Bytes of what no plan counts: buffers, counters of an optimizer."""
PARTS = ("weights", "optimizer", "reference")
"""Gradients may come with the step and go with it."""


def check_plan_is_what_the_backend_holds(subject: Subject) -> None:
    """Planned weights, optimizer state and reference are what `held_bytes` counts after a step. (DESIGN 5)"""
    model = _planned(subject)
    if "offload" not in subject.config.supports:
        raise NotApplicable("the backend does not count what it holds: no supports={'offload'}")
    if subject.settings.policy.get("lora"):
        raise NotApplicable("adapters are refused on random weights")
    backend = build_trainer(subject, reference=True, init="random")  # what is read from a file may stay mapped
    backend.train_step(ragged_batch(), WeightedNLL())
    assert isinstance(backend, OffloadingBackend)
    held = backend.held_bytes()
    for part in PARTS:
        planned = total(found for found in model.moments.lasting if found.held == part)
        gap = abs(planned - held.get(part, 0))  # type: ignore[call-overload]
        expect(
            gap <= TOLERANCE_FRAC * planned + BUFFERS,
            f"planned are {planned:.0f} bytes of {part}, and it holds {held.get(part, 0)}",  # type: ignore[call-overload]
        )


def check_plan_grows_with_the_microbatch(subject: Subject) -> None:
    """A plan of longer microbatches takes no less memory, and one of more ranks no more. (DESIGN 5)"""
    model = _planned(subject)
    peaks = [total(replace(model, microbatch_tokens=tokens).moments.peak) for tokens in (64, 1024, 16384)]
    expect(peaks == sorted(peaks), f"microbatches of 64, 1,024 and 16,384 tokens take {peaks} bytes")
    spread = [total(replace(model, ranks=ranks).moments.peak) for ranks in (8, 1)]
    expect(spread == sorted(spread), f"on 8 ranks and on one it takes {spread} bytes")


def _planned(subject: Subject) -> HeldModel:
    if not isinstance(subject.config, PlansTraining):
        raise NotApplicable("the config class does not inherit PlansTraining")
    policy, stored = policy_config(subject), stored_config(model_folder(subject))
    assert stored is not None, "the model's folder has a config"
    geometry = Geometry.from_config(stored)
    return HeldModel("policy", policy, geometry, ranks=1, has_reference=True, microbatch_tokens=512, accumulates=False)
