"""The configs of the loggers; each ``build`` imports its library and nothing before does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.config import FileName, ServerURL
from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import LoggerConfig
from nemorl_trust.encryption import plaintext_problem
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Logger


class TensorBoardConfig(LoggerConfig):
    """Scalars as TensorBoard event files, written without torch or TensorFlow."""

    summary: ClassVar[str] = "TensorBoard event files in the run directory"
    requires_modules: ClassVar[tuple[str, ...]] = ("tensorboard",)
    install_hint: ClassVar[str] = "pip install nemorl-insight"

    folder: FileName = "tensorboard"
    """Folder of the event files, inside the run directory unless absolute."""
    flush_seconds: int = 30
    """Longest time a number waits in memory. Lower it to watch fast runs live."""

    def build(self, run_dir: Path) -> Logger:
        from nemorl_insight.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger(Path(run_dir) / self.folder, flush_seconds=self.flush_seconds)


class WandbConfig(LoggerConfig):
    """Weights & Biases. The API key comes from ``wandb login`` or ``WANDB_API_KEY``, never from a config."""

    summary: ClassVar[str] = "Weights & Biases, online or offline"
    requires_modules: ClassVar[tuple[str, ...]] = ("wandb",)
    install_hint: ClassVar[str] = 'pip install "nemorl-insight[wandb]"'

    project: str = "nemorl"
    """Project that the run appears in."""
    entity: str | None = None
    """Team or user that owns the project. Unset: your default one."""
    run_name: str | None = None
    """Name shown for the run. Unset: the name of the run directory."""
    tags: tuple[str, ...] = ()
    """Labels to filter runs by."""
    mode: Literal["online", "offline"] | None = None
    """``offline`` writes to the run directory only; ``wandb sync`` uploads it later. Unset: what ``WANDB_MODE``
    says, else online."""
    samples: int = Field(0, ge=0, le=1000)
    """Prompts and responses sent as a table, of each step that the run records (``records``); 0: none."""

    def build(self, run_dir: Path) -> Logger:
        from nemorl_insight.loggers.wandb import WandbLogger

        return WandbLogger(self, Path(run_dir))


class SwanLabConfig(LoggerConfig):
    """SwanLab. The API key comes from ``swanlab login`` or ``SWANLAB_API_KEY``, never from a config."""

    summary: ClassVar[str] = "SwanLab, online, local or offline"
    requires_modules: ClassVar[tuple[str, ...]] = ("swanlab",)
    install_hint: ClassVar[str] = 'pip install "nemorl-insight[swanlab]"'

    project: str = "nemorl"
    """Project that the run appears in."""
    workspace: str | None = None
    """Team or user that owns the project. Unset: your default one."""
    run_name: str | None = None
    """Name shown for the run. Unset: the name of the run directory."""
    tags: tuple[str, ...] = ()
    """Labels to filter runs by."""
    mode: Literal["online", "local", "offline", "disabled"] | None = None
    """``local`` writes to the run directory for SwanLab's dashboard, ``offline`` for ``swanlab sync``. Unset: what
    ``SWANLAB_MODE`` says, else online."""

    def build(self, run_dir: Path) -> Logger:
        from nemorl_insight.loggers.swanlab import SwanLabLogger

        return SwanLabLogger(self, Path(run_dir))


class MLflowConfig(LoggerConfig):
    """MLflow tracking."""

    summary: ClassVar[str] = "MLflow tracking"
    requires_modules: ClassVar[tuple[str, ...]] = ("mlflow",)
    install_hint: ClassVar[str] = 'pip install "nemorl-insight[mlflow]"'

    experiment: str = "nemorl"
    """Experiment that the run belongs to; created if there is none of that name."""
    tracking_uri: ServerURL | None = None
    """Server or store, e.g. ``https://host:5000``. Unset: ``MLFLOW_TRACKING_URI``, or MLflow's local default."""
    plaintext: bool = False
    """Let metrics and samples go to another machine over ``http`` all the same."""
    run_name: str | None = None
    """Name shown for the run. Unset: the name of the run directory."""
    samples: int = Field(0, ge=0, le=1000)
    """Prompts and responses stored as tables, of each step that the run records (``records``); 0: none."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        uri = self.tracking_uri
        if uri is not None and not self.plaintext and (problem := plaintext_problem(uri)) is not None:
            yield ConfigIssue("tracking_uri", *problem)

    def build(self, run_dir: Path) -> Logger:
        from nemorl_insight.loggers.mlflow import MLflowLogger

        return MLflowLogger(self, Path(run_dir))
