"""Prints, as JSON, what goes wrong with losses, training and generation on a GPU that is not there (``pretended_gpu``).

python tests/pretended_gpu_checks.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TRAINING = (
    "logprobs_equal_transformers",
    "one_step_equals_transformers_and_adamw",
    "likeliest_tokens_are_those_of_transformers",
    "values_are_those_of_the_saved_model",
)
GENERATION = ("update_weights_takes_effect", "top_k_draws_from_the_k_most_likely")
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": {"policy": {"lora": {"rank": 4}}},
    "bfloat16": {"policy": {"precision": "bfloat16"}, "tolerance": 0.2},
}


def check_losses(device: str) -> dict[str, str]:
    """Every kind of loss, forward and backward."""
    from conformance.test_every_loss import LOSSES, batch_for

    failed = {}
    for loss in {type(loss): loss for loss in LOSSES}.values():
        outputs, batch = batch_for(loss, 0)
        try:
            value, _ = loss(outputs.to(device).requires_grad_(), batch.to(device))
            value.backward()
        except Exception as error:
            failed[type(loss).__name__] = str(error)
    return failed


def check_backends(device: str) -> dict[str, str]:
    """Clauses of the contracts that together reach all of the two backends' tensors."""
    from nemorl_testing.kit import run_checks

    reports = {
        name: run_checks("training_backends", "dtensor", only=TRAINING, **{"device": device, "tolerance": 1e-3, **more})
        for name, more in SETTINGS.items()
    }
    hosted = {"name": "dtensor", "offload": {"activations": True}}
    reports["activations on the host"] = run_checks(
        "training_backends", hosted, only=TRAINING, device=device, tolerance=1e-3
    )
    reports["generation"] = run_checks("generation_backends", "hf", only=GENERATION, device=device, tolerance=1e-3)
    return {
        f"{name}: {check}": str(error) for name, report in reports.items() for check, error in report.failed.items()
    }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from pretended_gpu import pretended_gpu

    with pretended_gpu() as device:
        print(json.dumps({**check_losses(device), **check_backends(device)}))


if __name__ == "__main__":
    main()
