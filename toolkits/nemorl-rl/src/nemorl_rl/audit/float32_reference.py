"""A model's results without the rounding of a lower precision: a second trainer, in float32."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from nemorl.base.files.owned_folders import mark
from nemorl.contracts import TrainingBackend
from nemorl.errors import boundary
from nemorl.resources.worker import WorkerContext

from nemorl_rl.config import RolloutRunConfig

if TYPE_CHECKING:
    from nemorl.config import PolicyConfig


class Float32Reference:
    """The weights that a trainer has now, in float32: built when first asked for, shut down when its block is left."""

    def __init__(self, config: RolloutRunConfig, trainer: TrainingBackend) -> None:
        """
        Args:
            config: Of the trainer.
            trainer: Whose weights do not change within the block.
        """
        self._config, self._trainer = config, trainer
        self._found: TrainingBackend | None = None

    def __enter__(self) -> Float32Reference:
        return self

    def __exit__(self, *_: object) -> None:
        if self._found is not None:
            self._found.shutdown()
            self._found = None

    @property
    def is_needed(self) -> bool:
        """Whether the trainer rounds to less than float32."""
        return self._config.policy.precision != "float32"

    @property
    def trainer(self) -> TrainingBackend:
        """The second trainer.

        Raises:
            BackendError: It cannot be built.
        """
        if self._found is None:
            what = "the float32 reference of the trainer"
            with TemporaryDirectory(prefix="nemorl-doctor-") as folder, boundary(what):
                mark(folder)
                self._trainer.save_pretrained(Path(folder))
                changes = {"model_name": folder, "precision": "float32", "init": "pretrained", "lora": None}
                policy: PolicyConfig = self._config.policy.model_copy(update=changes)
                context = WorkerContext(device=self._config.cluster.device, seed=self._config.seed)
                self._found = policy.backend.build(policy, context, reference=False)
        return self._found
