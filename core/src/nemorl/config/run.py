"""``RunConfig``: everything that describes one run, whatever the algorithm.

An algorithm's config subclasses :class:`RunConfig` and adds its knobs at the top level. Defaults are the vetted
setting; a config file says only what differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, model_validator

from nemorl.base.process.deadlines import deadline
from nemorl.base.step_metrics import STEP_METRICS
from nemorl.base.text.naming import ModelName
from nemorl.base.text.scalars import Duration
from nemorl.config.base import PLUGINS, RESUMABLE, Config
from nemorl.config.cluster import ClusterConfig
from nemorl.config.component import Component
from nemorl.config.models import AuxiliaryModel, GenerationConfig, Placement, PolicyConfig
from nemorl.config.plugin_lists import PluginsConfig, policy_in
from nemorl.contracts import Head
from nemorl.errors import ConfigIssue, NemorlError, boundary
from nemorl.metrics import MetricInfo, metric_problem
from nemorl.plugins import Registry, registry
from nemorl.plugins.kinds import DatasetConfig, LoggerConfig, PluginConfig
from nemorl.plugins.slots import foreign_words
from nemorl.resources.preflight import launch_problems


class ValidationConfig(Config):
    """Held-out evaluation during training.

    >>> ValidationConfig(every=20, at_start=True).max_samples
    256
    """

    every: int = Field(10, ge=0)
    """Steps between validations; 0 turns them off."""
    at_start: bool = False
    """Validate before the first step, to have a baseline."""
    at_end: bool = True
    """Validate after the last step."""
    max_samples: int = Field(256, ge=1)
    """Rows used, from the start of the validation split; of each, where there are several."""
    data: Annotated[DatasetConfig, Component("datasets")] | None = None
    """Another dataset to validate on, or several by name: ``{aime24: aime24, mine: {name: file, path: …}}``. Unset: the
    validation split of ``data``."""


class CheckpointConfig(Config):
    """When to save, and what to keep.

    >>> CheckpointConfig(every=10, keep_best=2).keep_last
    2
    """

    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = Field(2, ge=1)
    """Most recent checkpoints kept."""
    keep_best: int = Field(1, ge=0)
    """Best checkpoints kept, by ``metric``."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep, for good, every checkpoint whose step is a multiple of this, to look back on the whole run. It should
    be a multiple of ``every``. Unset: none."""
    metric: str | None = None
    """Full name of the logged metric that ranks checkpoints, e.g. ``train/reward``. Unset: the algorithm's own, e.g.
    ``validation/accuracy``."""
    higher_is_better: bool = True
    """Direction of ``metric``; ignored while that is unset."""
    save_optimizer: bool = True
    """``false`` saves a third of the size or less. A run that resumes from such a checkpoint has a new optimizer."""
    asynchronous: bool = False
    """Train on while a copy of the state in host memory is being written (elsewhere: ``async_save``)."""
    must_save_by: Annotated[str | None, Duration()] = None
    """Time since the process began, as ``DD:HH:MM:SS`` or ``3h45m``, by which a last checkpoint is saved; the run then
    stops, to be resumed. Set it to a little less than the time limit of the job."""
    export: bool = True
    """Write the final policy as a Hugging Face folder ``model/`` in the run directory."""


class RunConfig(Config):
    """One run. Algorithms subclass it; users write it as YAML, JSON, a dict or Python.

    >>> RunConfig(policy=PolicyConfig(model_name="org/model"), max_steps=10).max_epochs
    1
    """

    summary: ClassVar[str] = ""
    """One line for ``plugins list``, set by the algorithm."""
    trainer: ClassVar[str] = ""
    """``module:class`` of the algorithm's ``BaseTrainer`` subclass, imported by ``build``."""
    best_metric: ClassVar[str] = "validation/accuracy"
    """Metric that ranks checkpoints unless ``checkpoint.metric`` names another."""
    best_is_highest: ClassVar[bool] = True
    """Direction of ``best_metric``."""
    policy_head: ClassVar[Head] = "language_model"
    """Output of the policy at each token; ``value`` for reward models."""
    metrics: ClassVar[Mapping[str, MetricInfo]] = STEP_METRICS
    """Metrics of the algorithm by full name, e.g. ``train/loss``. ``<part>`` stands for any text."""
    other_paths: ClassVar[Mapping[str, str]] = {"policy.model_name": "model"}
    """Fields that a file may also write elsewhere: path of the field -> the other path, which errors name."""
    needs_columns: ClassVar[tuple[frozenset[str], ...]] = ()
    """Alternative sets of columns, one of which a train row must have. Empty: any row will do."""
    needs_capabilities: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Capabilities that backends of the policy (``policy``) and of auxiliary models (their role, up to a dot) need."""

    algorithm: str = ""
    """Name of the algorithm. Fixed by the class in Python; chooses the class in files."""
    model: ModelName | None = Field(None, exclude=True)
    """Hugging Face name or local folder: short for ``policy.model_name``."""
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    """The model and how it is trained."""
    data: Annotated[DatasetConfig, Component("datasets")] | None = None
    """Dataset: a name, or a mapping with ``name`` and its options. Unset: pass one to ``fit``."""
    cluster: Annotated[ClusterConfig, RESUMABLE] = Field(default_factory=ClusterConfig)
    """Where the run executes."""
    validation: Annotated[ValidationConfig, RESUMABLE] = Field(default_factory=ValidationConfig)
    """Held-out evaluation."""
    checkpoint: Annotated[CheckpointConfig, RESUMABLE] = Field(default_factory=CheckpointConfig)
    """Saving and keeping."""
    loggers: Annotated[tuple[Annotated[LoggerConfig, Component("loggers")], ...], RESUMABLE] = ()
    """Extra metric sinks. Console and ``metrics.jsonl`` are always on."""
    plugins: Annotated[PluginsConfig, RESUMABLE] = Field(default_factory=PluginsConfig)
    """Plugin policy of this run."""
    max_steps: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Stop after this many steps. Unset: ``max_epochs`` decides."""
    max_epochs: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Stop after this many passes over the data, if ``max_steps`` has not come first."""
    seed: int = Field(42, ge=0, le=2**63 - 1)
    """Seeds data order, sampling, initialisation and dropout. Same seed, same machine: same run."""
    shuffle: bool = True
    """Rows come in another order each epoch. ``false``: in the order of the data."""
    run_dir: Annotated[Path | None, RESUMABLE] = None
    """Where the run keeps everything it writes. Unset: ``runs/<name>``, the same for the same config."""

    @property
    def registry(self) -> Registry:
        """The plugins that this run may use."""
        return registry().restricted(self.plugins.policy())

    @model_validator(mode="before")
    @classmethod
    def _under_its_own_policy(cls, data: Any, info: ValidationInfo) -> Any:
        """Configs built in Python are read with the plugins that their policy admits, too."""
        if info.context is not None or not isinstance(data, dict) or not data.get("plugins"):
            return data
        read = cls.model_validate(data, context={PLUGINS: registry().restricted(policy_in(data))})
        return {name: getattr(read, name) for name in read.model_fields_set}

    @model_validator(mode="before")
    @classmethod
    def _expand_model(cls, data: Any) -> Any:
        """``model`` and ``policy.model_name`` are one: whichever is given is both."""
        if not isinstance(data, dict):
            return data
        model, policy = data.get("model"), data.get("policy")
        policy = {} if policy is None else policy  # built by its factory it would have no path
        named: Any = None
        if isinstance(policy, PolicyConfig):
            named = policy.model_name
            if not named and isinstance(model, str):
                policy = policy.model_copy(update={"model_name": os.path.expanduser(model)})
        elif isinstance(policy, dict):
            named = policy.get("model_name")
            policy = {**policy, "model_name": model} if not named and isinstance(model, str) else policy
        return {**data, "model": named if model is None and named else model, "policy": policy}

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not self.policy.model_name:
            yield ConfigIssue("model", "no model given", "set `model:` to a Hugging Face name or a local folder")
        elif self.model not in (None, self.policy.model_name):
            yield ConfigIssue(
                "model",
                f"model is {self.model!r} but policy.model_name is {self.policy.model_name!r}",
                "give the model once",
            )
        yield from self._rank_problems()
        yield from self._capability_problems()
        if self.checkpoint.metric is not None:
            validates = self.validation.every > 0 or self.validation.at_start or self.validation.at_end
            found = metric_problem(
                self.checkpoint.metric, declared_metrics(self), validates=validates, has_hooks=bool(self.plugins.hooks)
            )
            if found is not None:
                yield ConfigIssue("checkpoint.metric", *found)
        yield from self.interpreter_problems("policy", self.policy)

    def _rank_problems(self) -> Iterator[ConfigIssue]:
        sampler = self.sampler
        ranks = (
            self.cluster.world_size
            if sampler is None
            else self.cluster.training_workers(sampler.backend.devices_per_replica)
        )
        if ranks < 1:
            yield ConfigIssue(
                "cluster.generation_workers",
                f"generation apart takes all {self.cluster.world_size} devices, training has none",
                "lower it, or raise cluster.gpus_per_node (without GPUs: cluster.workers_per_node)",
            )
            return
        for role, model in self._models.items():
            together = model.policy.backend.ranks_per_copy(model.policy)
            if ranks % together:
                rest = self.cluster.world_size - ranks
                has = f"{ranks} devices{f' ({rest} of the {ranks + rest} generate)' if rest else ''}"
                yield ConfigIssue(
                    f"{role}.tensor_parallel_size",
                    f"a copy of the model spreads over {together} devices, and training has {has}: that leaves a rest",
                    "lower it, or raise cluster.gpus_per_node (workers_per_node on the CPU)",
                )
                continue
            for problem in model.policy.backend.rank_problems(model.policy, ranks):
                yield replace(problem, path=f"{role}.{problem.path}")

    def _capability_problems(self) -> Iterator[ConfigIssue]:
        for role, model in self._models.items():
            needed = self.needs_capabilities.get(role.partition(".")[0], frozenset()) | (
                {"value_head"} if model.head == "value" else set()
            )
            needed |= set() if self.checkpoint.save_optimizer else {"weights_only_checkpoint"}
            needed |= {"asynchronous_checkpoint"} if self.checkpoint.asynchronous else set()
            missing = needed - model.policy.backend.supports
            if missing:
                yield ConfigIssue(
                    f"{role}.backend",
                    f"{registry().name_of('training_backends', type(model.policy.backend))} does not support "
                    f"{', '.join(sorted(missing))}, which this run needs",
                    "choose another training backend (`nemorl plugins show NAME` lists capabilities)",
                )

        able = frozenset() if self.sampler is None else self.sampler.backend.supports
        if lacking := self.policy.backend.asks_of_sampler - able:
            nobody = "this run does not sample" if self.sampler is None else "generation.backend does not tell them"
            message = f"its options need the sampler's {', '.join(sorted(lacking))}, and {nobody}"
            yield ConfigIssue("policy.backend", message, "leave them out, or use generation.backend: hf in a run of RL")

    def launch_problems(self) -> Iterator[ConfigIssue]:
        """Settings that a run started from a file still lacks; in Python these can be given to ``fit`` instead."""
        if self.data is None:
            yield ConfigIssue("data", "no dataset given", "set `data:`, e.g. `data: arithmetic`")
        elif self.needs_columns:
            yield from self._column_problems(self.data)

    def dry_run(self, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
        """Problems that would end a run of this config alone, as far as it can be known without loading a model.

        Args:
            run_dir: Where it would write.
            warn: Told what may go wrong.
        """
        yield from launch_problems(self, run_dir, warn)

    def _column_problems(self, data: DatasetConfig) -> Iterator[ConfigIssue]:
        try:
            owner, limit_s = f"dataset {type(data).__name__}", self.plugins.build_timeout_s
            with boundary(owner), deadline(f"reading {owner}", limit_s, setting="plugins.build_timeout_s"):
                row = data.first_row()
        except NemorlError as error:
            yield ConfigIssue("data", error.message, error.fix)
            return
        present = {column for column, value in (row or {}).items() if value is not None}
        if row is not None and not any(columns <= present for columns in self.needs_columns):
            wanted = ", or ".join(" with ".join(f"`{column}`" for column in sorted(c)) for c in self.needs_columns)
            yield ConfigIssue(
                "data",
                f"{self.algorithm} needs rows with {wanted}; the first one has {', '.join(map(str, row)) or 'nothing'}",
                foreign_words("column", row) or "map your columns to these in `data:`, or choose another dataset",
            )

    def interpreter_problems(self, part: str, model: PolicyConfig | GenerationConfig) -> Iterator[ConfigIssue]:
        """A part of the run that needs an interpreter of its own, on a launcher that has one."""
        if model.interpreter is not None and not self.cluster.uses_ray:
            key = "python" if model.python is not None else "backend"
            message = f"it runs under {model.interpreter}, and the local launcher has one interpreter"
            yield ConfigIssue(f"{part}.{key}", message, "set cluster.launcher: ray")

    @property
    def sampler(self) -> GenerationConfig | None:
        """The engine that samples from the policy during the run; ``None``: there is none."""
        return None

    def place(self) -> Placement:
        """Where the run's parts go. Asks the registry: call it once and hand the answer on."""
        return Placement()

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen initial policy is needed. Algorithms that compare against it override this."""
        return False

    @property
    def _models(self) -> Mapping[str, AuxiliaryModel]:
        """All models that workers hold, by the role that names them in messages."""
        return {"policy": AuxiliaryModel(self.policy, self.policy_head), **self.auxiliary_models}

    @property
    def auxiliary_models(self) -> Mapping[str, AuxiliaryModel]:
        """The other models of the run by role, e.g. ``critic``. Algorithms that have any override this."""
        return {}

    def build(self) -> Any:
        """The trainer of this algorithm, a ``BaseTrainer``: the line that imports torch."""
        owner, limit_s = f"algorithm {self.algorithm or type(self).__name__}", self.plugins.import_timeout_s
        with (
            boundary(owner, passing=(Exception,)),
            deadline(f"importing {owner}", limit_s, setting="plugins.import_timeout_s"),
        ):
            trainer: Any = EntryPoint("trainer", self.trainer, "nemorl").load()(self)
        return trainer


def declared_metrics(part: object) -> dict[str, MetricInfo]:
    """Metrics that a run, or a part of one, and the plugins in it declare."""
    found: dict[str, MetricInfo] = {}
    if isinstance(part, RunConfig | PluginConfig) and "metrics" not in type(part).model_fields:  # an option's name
        found.update(part.metrics)
        own = [(name[11:], info) for name, info in found.items() if name.startswith("validation/")]
        found.update({f"validation/<set>/{name}": info for name, info in own})
    if isinstance(part, Config):
        part = dict(part)
    inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, tuple | list) else ()
    for value in inner:
        found.update(declared_metrics(value))
    return found
