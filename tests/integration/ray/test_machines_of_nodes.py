"""Two nodes of one machine, with addresses of their own: each is watched, by one process at most, and none is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from nemorl import Callback
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SECOND = "127.0.0.2"
PLAIN = {"plaintext": True}
"""What an address of this machine beyond its loopback asks for: this cluster has no certificates."""
OTHER_NODE = "system/node.1.process_mem_gib"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1, node_ip_address=SECOND)
        cluster.wait_for_nodes()
        yield cluster.address
        ray.shutdown()
        cluster.shutdown()


class UntilSeen(Callback):
    """Ends the run once the other node was seen, and counts who watches it meanwhile."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.watchers = 0

    def on_log(self, metrics: Mapping[str, float]) -> None:
        self.seen.update({name: value for name, value in metrics.items() if name.startswith("system/")})

    def on_step_end(self, trainer: Any) -> None:
        self.watchers = max(self.watchers, watchers())
        if OTHER_NODE in self.seen:
            trainer.stop("the other node was seen")
        else:
            time.sleep(0.5)


def watchers() -> int:
    """Of the nodes that this process started: beside it, others may run."""
    found = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += "Watcher" in process.name()
    return found


@pytest.mark.full
def test_each_node_is_watched_and_nobody_is_left(address: str, tiny_model: Path, tmp_path: Path) -> None:
    before, callback = watchers(), UntilSeen()
    config = GRPOConfig(
        model=str(tiny_model),
        policy={"init": "random", "max_sequence_tokens": 32},
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        generation={"max_new_tokens": 4},
        validation={"every": 0, "at_end": False},
        max_steps=200,
        run_dir=tmp_path / "run",
        cluster={
            "address": address,
            "security": {"plaintext": True},
            "num_nodes": 2,
            "workers_per_node": 1,
            "colocated": False,
        },
        plugins={"hooks": [{"name": "efficiency", "sample_every_s": 0.2}]},
    )
    rows = [{"prompt": f"{n}+1="} for n in range(8)]
    config.build().fit(rows, lambda prompt, response: 1.0, callbacks=[callback], console=Console(quiet=True))
    seen = callback.seen
    # One machine: both nodes have the same memory. Its processes are the driver and one worker, and another worker.
    assert seen["system/node.0.mem_total_gib"] == seen["system/node.1.mem_total_gib"]
    assert seen["system/node.0.process_mem_gib"] > seen[OTHER_NODE] > 0
    assert not [name for name in seen if name.startswith("system/node.2")]
    assert callback.watchers - before == 1
    deadline = time.monotonic() + 30
    while watchers() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert watchers() == before
