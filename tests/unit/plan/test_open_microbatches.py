"""Microbatches whose size a config leaves open are as large as fits the memory that a run has."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl_rl.placement.engines import RolloutResources
from nemorl_rl.planning.devices import Device, device_named, this_cpu
from nemorl_rl.planning.memory import reading
from nemorl_rl.planning.memory.budgets import fullest
from nemorl_rl.planning.memory.models import MICROBATCH_TOKENS
from nemorl_rl.planning.memory.reading import known_scene

QWEN_HALF_B = {
    **{"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14},
    **{"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
}


def config(folder: Path, *, gpus: int = 0, **policy: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(QWEN_HALF_B))
    lengths = {"max_sequence_tokens": 300, **policy}
    run = {"algorithm": "grpo", "model": str(folder), "data": "arithmetic", "environment": "math"}
    cluster = {"gpus_per_node": gpus} if gpus else {}
    return load_config(
        {
            **run,
            "num_prompts_per_step": 64,
            "policy": lengths,
            "generation": {"max_new_tokens": 200},
            "cluster": cluster,
        },
        for_cluster=True,
    )


def of(device: Device, gib: float) -> Device:
    return replace(device, memory_gib=gib)


def test_on_a_processor_they_follow_the_host_s_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for gib in (64.0, 20.0, 16.0, 12.0):
        monkeypatch.setattr(reading, "this_cpu", lambda gib=gib: of(this_cpu(), gib))
        scene = known_scene(config(tmp_path))
        assert scene is not None
        found[gib] = (scene.policy.default_budget, fullest(scene).fits)
    # Backends take 1,536 by themselves. On 12 GiB the engine's cache does not fit in any case, and
    # training with 512 takes no more than that lacks.
    assert found == {64.0: (None, True), 20.0: (None, True), 16.0: (1024, True), 12.0: (512, False)}


def test_the_size_that_is_named_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "this_cpu", lambda: of(this_cpu(), 16.0))
    scene = known_scene(config(tmp_path, microbatch_tokens=1536))
    assert scene is not None
    assert scene.policy.default_budget is None
    assert scene.policy.budget == 1536


@pytest.mark.parametrize(
    ("gpus", "gib", "tokens"), [(0, 16.0, 1024), (0, 64.0, None), (1, 80.0, None), (1, 24.0, 4096)]
)
def test_a_run_takes_them_and_says_why(
    gpus: int, gib: float, tokens: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "this_cpu", lambda: of(this_cpu(), gib))
    monkeypatch.setattr(reading, "this_gpu", lambda: of(device_named("H100"), gib))
    with closing(RolloutResources(config(tmp_path, gpus=gpus), tmp_path / "run")) as resources:
        assert resources.config.policy.microbatch_tokens == tokens
        remarks = resources.new_remarks()
        assert [str(tokens) in text for text in remarks if "policy.microbatch_tokens" in text] == [True] * bool(tokens)
        assert not [text for text in resources.new_remarks() if "policy.microbatch_tokens" in text]
    assert tokens is None or tokens < MICROBATCH_TOKENS[gpus == 0]
