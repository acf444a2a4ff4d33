"""The device is named by the cluster's config, and what PyTorch does not see is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl.config.cluster import ClusterConfig
from nemorl.config.load import load_config
from nemorl.errors import BackendError
from nemorl.plugins.registry import registry
from nemorl_rl.placement.place import choose_transport
from recorded_messages import Raises


@pytest.mark.parametrize(
    ("fields", "device"),
    [
        ({"accelerator": "mps"}, "mps:0"),
        ({"accelerator": "xpu", "gpus_per_node": 8}, "xpu:0"),
        ({"accelerator": "xpu", "gpus_per_node": 0}, "cpu"),
        ({"accelerator": "npu", "workers_per_node": 2}, "cpu"),
        ({"gpus_per_node": 0}, "cpu"),
        ({}, "cuda:0"),
        ({"gpus_per_node": 2}, "cuda:0"),
    ],
)
def test_workers_compute_on_the_accelerator_that_is_named(
    fields: dict[str, object], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert ClusterConfig.model_validate(fields).device == device


def test_transports_that_mean_no_device_serve_all() -> None:
    offered = ["cuda_ipc", "shared_memory"]
    chosen = {
        device: choose_transport(offered, offered, "node", plugins=registry(), device=device)
        for device in ("cuda:0", "xpu:0", "cpu")
    }
    assert {device: (name or "").rpartition(":")[2] for device, name in chosen.items()} == {
        "cuda:0": "cuda_ipc",
        "xpu:0": "shared_memory",
        "cpu": "shared_memory",
    }


def test_one_that_is_not_there_is_refused(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "run_dir": str(tmp_path / "run"),
            "cluster": {"accelerator": "mps"},
        }
    )
    with raises(BackendError, "mps", "cluster.accelerator"):
        config.build().fit([{"prompt": "1"}], lambda prompt, response: 1.0)
