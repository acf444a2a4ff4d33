"""float32 masters begin as the weights were before they were rounded, whatever part of them a rank updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from layouts import EP, HEADS, MIXTURE, PLAIN, PP, TP, VPP
from megatron_masters import masters, weights
from nemorl.config import PolicyConfig
from nemorl_dtensor.model import load_model
from nemorl_rl.models.tiny import write_tiny_model
from spawned import run_calls

pytestmark = [pytest.mark.full, pytest.mark.megatron, pytest.mark.slow]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, **HEADS}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({}, {}),
    "dp2 plain": ({}, PLAIN),
    "tp2": (TP, {}),
    "pp2": ({}, PP),
    "vpp2": ({}, VPP),
    "ep2": ({}, EP),
}


def test_they_are_what_the_files_have_or_what_is_drawn(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **{**SIZES, **MIXTURE})
    load_model(PolicyConfig(model_name=str(folder), init="random"), seed=7).save_pretrained(folder)
    policies = [
        {"model_name": str(folder), "init": init, "backend": {"name": "megatron", **options}, **policy}
        for policy, options in LAYOUTS.values()
        for init in ("pretrained", "random")
    ]
    low = [{**policy, "precision": "bfloat16"} for policy in policies]
    calls = [(weights, (policy,)) for policy in policies] + [(masters, (policy,)) for policy in low]
    found = run_calls(calls, 2)
    for policy, exact, begun in zip(policies, found, found[len(policies) :], strict=False):
        for parameters, shares in zip(exact, begun, strict=True):
            updated = [(values, *share) for values, share in zip(parameters, shares, strict=True) if share is not None]
            assert updated, policy
            for values, start, master in updated:
                assert torch.equal(master, values[start : start + len(master)]), policy
