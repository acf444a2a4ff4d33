"""What crosses to worker processes: a guide-style trainer's loss, an engine on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl_compat.policies import VllmGeneration
from nemorl_compat.trainers import BaseTrainer
from nemorl_testing.models import tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(8)]


@pytest.mark.usefixtures("private_ray")
def test_a_guide_style_trainer_on_two_workers_gives_the_losses_of_one_process(tmp_path: Path) -> None:
    class Imitation(BaseTrainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = config.get("own", {}).get("scale", 1.0)

        def _compute_loss(self, batch: Any, outputs: Any) -> Any:
            return -self.scale * (outputs * batch.loss_weights).sum()

    def losses(name: str, **cluster: Any) -> list[float]:
        settings = {"max_steps": 3, "batch_size": 8, "run_dir": tmp_path / name, "cluster": cluster}
        own = {"model": str(tiny_model()), "own": {"scale": 2.0}, "policy": {"optimizer": {"lr": 1e-3}}}
        return [record["train/loss"] for record in Imitation({**settings, **own}).fit(ROWS).history]

    one = losses("one", launcher="local")
    assert losses("two", launcher="ray", workers_per_node=2) == pytest.approx(one, rel=1e-4)


@pytest.mark.usefixtures("private_ray")
def test_an_engine_on_a_cluster_says_what_one_in_this_process_says() -> None:
    from nemorl import RayVirtualCluster

    config = {"model_name": str(tiny_model()), "backend": "hf", "max_new_tokens": 4}
    said = []
    cluster = RayVirtualCluster([1])
    for places in (None, cluster):
        engine = VllmGeneration(places, config)
        said.append([sample.token_ids for sample in engine.generate(ROWS)])
        engine.close()
    cluster.shutdown()
    assert said[0] == said[1]
