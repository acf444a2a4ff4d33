"""The trainer of a recorded loop: each step runs the requests of the client's step, as the server did."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.metrics import Metrics, Sum
from nemorl.trainer import BaseTrainer
from nemorl.types import Row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.recording import NoRecorder, RolloutRecorder
from nemorl_rl.slots import OPEN_RECORDS

from nemorl_agents.tinker.flight.config import ClientLoopConfig
from nemorl_agents.tinker.flight.learned import learned
from nemorl_agents.tinker.flight.operations import read_step
from nemorl_agents.tinker.flight.repeating import Repeating
from nemorl_agents.tinker.losses import loss_named
from nemorl_agents.tinker.models import NewModel
from nemorl_agents.tinker.trained import TrainedModels, snapshot_sampler

LOOP = "the:loop"


class ClientLoopTrainer(BaseTrainer[ClientLoopConfig]):
    """Makes a client's loop again, without the client."""

    config_class = ClientLoopConfig

    def __init__(self, config: ClientLoopConfig) -> None:
        super().__init__(config)
        self.tokenizer: Tokenizer
        self.recorder: RolloutRecorder = NoRecorder()
        self._repeating: Repeating

    @property
    def batch_size(self) -> int:
        return 1

    def build_parts(self) -> None:
        run, config = self.run, self.config
        self.tokenizer = Tokenizer.of(config.policy)
        sampler = run.own(snapshot_sampler(config.generation, config.policy, run.policy.workers), "shutdown")
        base = str(config.policy.model_name)
        models = TrainedModels(base, config.policy, run.policy.workers, sampler)
        models.create(LOOP, NewModel(base_model=base, **config.adapter.model_dump()))
        models.use(LOOP)  # checkpoints are of what is in place
        scratch = run.own(tempfile.TemporaryDirectory(prefix="nemorl-loop-"), "cleanup")
        recorded = Path(config.data.path).parent  # type: ignore[union-attr]
        self._repeating = Repeating(models, LOOP, recorded, Path(scratch.name), loss_named)
        open_records = OPEN_RECORDS.filled() if config.records.max_gib > 0 else None
        if open_records is not None:
            self.recorder = run.own(open_records(self), "close")

    def weights_proven(self, versions: Sequence[int]) -> bool | None:
        """Nobody knows: clients publish weights one by one, without receipts."""
        return None

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        with self.run.timer.phase("policy_training"):
            made = self._repeating.step(rows[0]["step"], read_step(Path(rows[0]["file"])))
        found = learned(made, self.step, self.tokenizer.decode)
        self.recorder.rollout(found.samples, "train", self.step)
        self.recorder.batch(found.samples, [found.batch])
        return {**found.metrics, "samples_not_repeated": Sum(self._repeating.not_repeated)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A checkpoint that was saved while the loop went on knows fewer steps than there are now."""
        super().load_state_dict({**state, "data": {**self.batches.state_dict(), "position": state["step"]}})
