"""What ranks of ``test_megatron_tenants`` do: leave their device's memory, come back, and go on as before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl.contracts.memory import MemoryPart
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_megatron import MegatronConfig, MegatronGenerationConfig
from nemorl_testing import run_checks

ALL: list[MemoryPart] = ["gradients", "optimizer", "reference", "weights"]
REQUESTS = [GenerationRequest((9, 18, 10, 11), SamplingParams(max_new_tokens=12), (1, 2, 3))]


@dataclass(frozen=True)
class Case:
    """One way to spread a model."""

    model: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def check_offload(context: WorkerContext, case: Case) -> list[str]:
    """The clause of the conformance kit, on all ranks; what broke it."""
    report = run_checks(
        "training_backends",
        {"name": "megatron", **case.options},
        only=["what_leaves_the_device_comes_back_unchanged"],
        ranks=context,
        model=case.model,
        policy=dict(case.policy),
    )
    assert not report.skipped
    return [error.message for error in report.failed.values()]


def sleep_over_a_trainer(context: WorkerContext, case: Case) -> dict[str, bool]:
    """An engine over the trainer's weights: what it says before both left, and after both came back."""
    policy = PolicyConfig(model_name=case.model, max_sequence_tokens=64, **case.policy)
    trainer: Any = MegatronConfig(**case.options).build(policy, context, reference=True)
    engine = trainer.generator(MegatronGenerationConfig())
    before = engine.generate(REQUESTS)
    engine.sleep(1)
    trainer.offload(ALL)
    away = {**trainer.held_bytes(), **engine.held_bytes()}
    with pytest.raises(BackendError, match="weights"):
        engine.generate(REQUESTS)
    trainer.onload(["weights"])
    engine.wake(["cache"])
    after = engine.generate(REQUESTS)
    reference_is_away = trainer.held_bytes()["reference"] == 0
    engine.shutdown()
    trainer.shutdown()
    return {"same": after == before, "empty": not any(away.values()), "reference is away": reference_is_away}
