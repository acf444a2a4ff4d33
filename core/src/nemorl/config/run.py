"""``RunConfig``: everything that describes one run, whatever the algorithm.

An algorithm's config subclasses :class:`RunConfig` and adds its knobs at the top level. Defaults are the vetted
setting; a config file says only what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemorl.config.base import RESUMABLE, Config
from nemorl.config.cluster import LONGEST_WAIT_S, ClusterConfig
from nemorl.config.component import Component
from nemorl.config.models import Companion, GenerationConfig, PolicyConfig
from nemorl.config.plugin_lists import PluginsConfig
from nemorl.config.scalars import ExpandsHome
from nemorl.contracts import Head
from nemorl.deadlines import deadline
from nemorl.errors import NemorlError, Problem, boundary
from nemorl.observe.metric_names import metric_problem
from nemorl.plugins import registry
from nemorl.plugins.kinds import (
    DatasetConfig,
    EnvironmentConfig,
    LoggerConfig,
)
from nemorl.weights import choose_transport

if TYPE_CHECKING:
    from nemorl.trainer import BaseTrainer


class BreakerConfig(Config):
    """When steps that teach nothing end the run, or are warned of."""

    failed_frac: float = Field(1.0, gt=0, le=1)
    """Share of a step's episodes that must have timed out, or failed in the environment, for the step to count. Lower
    it where some tasks always get through."""
    failed_steps: int = Field(3, ge=0)
    """Such steps in a row after which the run ends with an error; 0: never."""
    equal_frac: float = Field(1.0, gt=0, le=1)
    """Share of a step's groups whose rewards must all be the same for the step to count."""
    equal_steps: int = Field(10, ge=0)
    """Such steps in a row after which ``on_equal`` happens; 0: never."""
    on_equal: Literal["warn", "stop"] = "warn"
    """``warn`` once, until a step has other rewards; ``stop`` with an error where hours are dear."""


class RolloutConfig(Config):
    """How responses are collected and scored."""

    mode: Literal["sync", "async"] = "sync"
    """``sync``: sample, then train. ``async``: sample the next batches while training on earlier ones."""
    max_staleness: int = Field(1, ge=0, le=10_000)
    """``async``: updates that may lie between the weights that sampled a token and those that learn from it. 0 is
    exactly ``sync``. What is older is dropped and counted in ``dropped_stale_groups``."""
    max_batches_per_step: Annotated[int, RESUMABLE] = Field(10, ge=1, le=1_000_000)
    """Where an algorithm rejects groups (dynamic sampling): batches sampled for one step before the run gives up."""
    environment_timeout_s: float = Field(60.0, gt=0, le=LONGEST_WAIT_S)
    """Seconds the environment may take for one response; then it scores 0 and counts in ``environment_timeout``."""
    episode_timeout_s: float | None = Field(None, gt=0, le=LONGEST_WAIT_S)
    """Seconds the environment may take for all responses of an episode together, generation not counted; then it ends
    with 0 and counts in ``episode_timeout``. Set it for long conversations. Unset: only each response is limited."""
    environment_concurrency: Annotated[int, RESUMABLE] = Field(16, ge=1, le=10_000)
    """Responses scored at the same time. Raise it for environments that wait on a network."""
    breaker: Annotated[BreakerConfig, RESUMABLE] = Field(default_factory=BreakerConfig)
    """When steps that teach nothing end the run, or are warned of."""
    mismatch_warning: Annotated[float, RESUMABLE] = Field(1.05, gt=1)
    """Warn when ``token_mult_prob_error`` exceeds this: the mean factor by which trainer and sampler differ in the
    probability of a sampled token. 1 is agreement. Raise it where a larger one is expected and corrected for."""
    mismatch_limit: Annotated[float | None, RESUMABLE] = Field(1.3, gt=1)
    """End the run when ``token_mult_prob_error`` exceeds this in its first step, or the first after it was resumed: the
    sampler then runs another model. Rounding to bfloat16 gives up to about 1.05. Unset (``null``): only warn."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.mismatch_limit is not None and self.mismatch_limit < self.mismatch_warning:
            yield Problem(
                "mismatch_limit",
                f"{self.mismatch_limit:g} is below mismatch_warning = {self.mismatch_warning:g}, which only warns",
                "raise mismatch_limit as well, or set it to null to be warned only",
            )


class ValidationConfig(Config):
    """Held-out evaluation during training."""

    every: int = Field(10, ge=0)
    """Steps between validations; 0 turns them off."""
    at_start: bool = False
    """Validate before the first step, to have a baseline."""
    at_end: bool = True
    """Validate after the last step."""
    max_samples: int = Field(256, ge=1)
    """Rows used, from the start of the validation split."""
    num_generations: int = Field(1, ge=1, le=100_000)
    """Responses per prompt; above 1 also reports pass@k for k = 1 … this."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of validation; 0 is greedy. Use 1.0 with num_generations above 1."""
    data: Annotated[DatasetConfig, Component("datasets")] | None = None
    """Another dataset to validate on. Unset: the validation split of ``data``."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.num_generations > 1 and self.temperature == 0:
            yield Problem(
                "temperature",
                "greedy responses to one prompt are all the same",
                "set validation.temperature above 0, or num_generations to 1",
            )


class CheckpointConfig(Config):
    """When to save, and what to keep."""

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
    export: bool = True
    """Write the final policy as a Hugging Face folder ``model/`` in the run directory."""


class RunConfig(Config):
    """One run. Algorithms subclass it; users write it as YAML, JSON, a dict or Python."""

    summary: ClassVar[str] = ""
    """One line for ``plugins list``, set by the algorithm."""
    trainer: ClassVar[str] = ""
    """``module:class`` of the algorithm's ``BaseTrainer`` subclass, imported by ``build``."""
    best_metric: ClassVar[str] = "validation/accuracy"
    """What ranks checkpoints unless ``checkpoint.metric`` says otherwise."""
    best_is_highest: ClassVar[bool] = True
    """Direction of ``best_metric``."""
    needs_generation: ClassVar[bool] = True
    """Whether the algorithm samples from the policy."""
    needs_environment: ClassVar[bool] = True
    """Whether what it samples must be scored. An environment that is given all the same counts for validation."""
    policy_head: ClassVar[Head] = "language_model"
    """What the policy says at each token; ``value`` for reward models."""
    needs_columns: ClassVar[tuple[frozenset[str], ...]] = ()
    """Alternative sets of columns, one of which a train row must have. Empty: any row will do."""
    needs_capabilities: ClassVar[Mapping[str, frozenset[str]]] = {}
    """What the backends of the policy (``policy``) and of companions (their role) must support."""

    algorithm: str = ""
    """Name of the algorithm. Fixed by the class in Python; chooses the class in files."""
    model: Annotated[str | None, ExpandsHome()] = None
    """Hugging Face name or local folder: short for ``policy.model_name``."""
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    """The model and how it is trained."""
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    """The sampling engine and its settings."""
    rollouts: RolloutConfig = Field(default_factory=RolloutConfig)
    """How responses are collected and scored."""
    data: Annotated[DatasetConfig, Component("datasets")] | None = None
    """Dataset: a name, or a mapping with ``name`` and its options. Unset: pass one to ``fit``."""
    environment: Annotated[EnvironmentConfig, Component("environments")] | None = None
    """What scores responses. Unset: pass ``reward_fn`` to ``fit``."""
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
    run_dir: Annotated[Path | None, RESUMABLE] = None
    """Where the run keeps everything it writes. Unset: ``runs/<name>``, the same for the same config."""

    @model_validator(mode="before")
    @classmethod
    def _expand_model(cls, data: Any) -> Any:
        if isinstance(data, dict):
            # A default built by its factory would lose its path in error messages.
            data = {"policy": {}, "generation": {}, **data}
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            policy = data.get("policy") or {}
            if isinstance(policy, dict) and not policy.get("model_name"):
                data = {**data, "policy": {**policy, "model_name": data["model"]}}
            elif isinstance(policy, PolicyConfig) and not policy.model_name:
                data = {**data, "policy": policy.model_copy(update={"model_name": data["model"]})}
        return data

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if not self.policy.model_name:
            yield Problem("model", "no model given", "set `model:` to a Hugging Face name or a local folder")
        elif self.model not in (None, self.policy.model_name):
            yield Problem(
                "model",
                f"model is {self.model!r} but policy.model_name is {self.policy.model_name!r}",
                "give the model once",
            )
        yield from self._rank_problems()
        yield from self._capability_problems()
        if self.checkpoint.metric is not None:
            validates = self.validation.every > 0 or self.validation.at_start or self.validation.at_end
            found = metric_problem(self.checkpoint.metric, validates=validates, has_hooks=bool(self.plugins.hooks))
            if found is not None:
                yield Problem("checkpoint.metric", *found)
        for part in ("policy", "generation"):
            model = getattr(self, part)
            if model.interpreter is not None and not self.cluster.uses_ray:
                key = "python" if model.python is not None else "backend"
                message = f"it runs under {model.interpreter}, and the local launcher has one interpreter"
                yield Problem(f"{part}.{key}", message, "set cluster.launcher: ray")
        if self.needs_generation:
            yield from self._generation_problems()
        index = registry().index.narrowed(self.plugins.policy())
        for kind in ("hooks", "report_sections"):
            for position, name in enumerate(getattr(self.plugins, kind)):
                try:
                    index.find(kind, name)
                except NemorlError as error:
                    yield Problem(f"plugins.{kind}.{position}", error.message, error.fix)

    def _rank_problems(self) -> Iterator[Problem]:
        width = self.generation.backend.devices_per_replica
        ranks = self.cluster.training_workers(width) if self.needs_generation else self.cluster.world_size
        if ranks < 1:
            yield Problem(
                "cluster.generation_workers",
                f"generation apart takes all {self.cluster.world_size} devices, training has none",
                "lower it, or give the cluster more devices",
            )
            return
        for role, model in self._models.items():
            together = model.policy.backend.ranks_per_copy(model.policy)
            if ranks % together:
                yield Problem(
                    f"{role}.tensor_parallel_size",
                    f"{together} ranks per copy of the model do not divide {ranks} training processes",
                    "lower it, or raise cluster.gpus_per_node (workers_per_node on the CPU)",
                )
                continue
            for problem in model.policy.backend.rank_problems(model.policy, ranks):
                yield replace(problem, path=f"{role}.{problem.path}")

    def _capability_problems(self) -> Iterator[Problem]:
        for role, model in self._models.items():
            needed = self.needs_capabilities.get(role, frozenset()) | (
                {"value_head"} if model.head == "value" else set()
            )
            missing = needed - model.policy.backend.supports
            if missing:
                yield Problem(
                    f"{role}.backend",
                    f"{registry().name_of('training_backends', type(model.policy.backend))} does not support "
                    f"{', '.join(sorted(missing))}, which {self.algorithm} needs",
                    "choose another training backend (`nemorl plugins show NAME` lists capabilities)",
                )

    @property
    def generation_lives_with_training(self) -> bool:
        """Whether the generator is built in the trainer's processes, over its weights."""
        host = self.generation.backend.lives_with
        if not self.needs_generation or not self.cluster.colocated or host is None:
            return False
        return registry().name_of("training_backends", type(self.policy.backend)) == host

    def _generation_problems(self) -> Iterator[Problem]:
        yield from self.generation.backend.policy_problems(
            self.policy, device=self.cluster.device, as_guest=self.generation_lives_with_training
        )
        if self.weight_transport is None and not self.generation_lives_with_training:
            asked = self.cluster.weight_transport
            yield Problem(
                "generation.backend" if asked is None else "cluster.weight_transport",
                f"no weight transport in common{f' called {asked!r}' if asked else ''} that works within one "
                f"{self.cluster.weight_distance} on {self.cluster.device}: training offers "
                f"{', '.join(self.policy.backend.weight_transports)}, generation accepts "
                f"{', '.join(self.generation.backend.weight_transports)}",
                "choose another generation backend" if asked is None else "leave it unset",
            )
        overlaps = self.rollouts.mode == "async" and self.rollouts.max_staleness > 0
        if overlaps and (not self.cluster.uses_ray or self.cluster.colocated):
            yield Problem(
                "rollouts.mode",
                "generation and training cannot overlap on the same devices",
                "set cluster.colocated: false with gpus_per_node (workers_per_node on the CPU) of at least 2, or "
                "rollouts.max_staleness: 0",
            )
        if self.cluster.uses_ray and self.cluster.colocated and self.generation.backend.devices_per_replica > 1:
            yield Problem(
                "cluster.colocated",
                "an engine that spreads over several devices cannot share them with training workers",
                "set cluster.colocated: false, or one device per engine",
            )
        if self.generation.max_new_tokens >= self.policy.max_sequence_tokens:
            yield Problem(
                "generation.max_new_tokens",
                f"{self.generation.max_new_tokens} leaves no room for a prompt within "
                f"policy.max_sequence_tokens = {self.policy.max_sequence_tokens}",
                "lower it, or raise policy.max_sequence_tokens",
            )

    @property
    def weight_transport(self) -> str | None:
        """How weights get from training to generation; ``None`` where the backends have no way in common."""
        asked, cluster = self.cluster.weight_transport, self.cluster
        offered, accepted = self.policy.backend.weight_transports, self.generation.backend.weight_transports
        if asked is not None:
            offered = (asked,)  # every trainer can send by any: the kernel does it with what `export_weights` yields
            accepted = (*accepted, asked) if "any_transport" in self.generation.backend.supports else accepted
        return choose_transport(
            offered, accepted, cluster.weight_distance, device=cluster.device, colocated=cluster.colocated
        )

    def launch_problems(self) -> Iterator[Problem]:
        """What a run started from a file still lacks; in Python these can be given to ``fit`` instead."""
        if self.data is None:
            yield Problem("data", "no dataset given", "set `data:`, e.g. `data: arithmetic`")
        elif self.needs_columns:
            yield from self._column_problems(self.data)
        if self.needs_generation and self.needs_environment and self.environment is None:
            yield Problem("environment", "nothing scores the responses", "set `environment:`, e.g. `environment: math`")

    def _column_problems(self, data: DatasetConfig) -> Iterator[Problem]:
        try:
            owner, limit_s = f"dataset {type(data).__name__}", self.plugins.build_timeout_s
            with boundary(owner), deadline(f"reading {owner}", limit_s, setting="plugins.build_timeout_s"):
                row = data.first_row()
        except NemorlError as error:
            yield Problem("data", error.message, error.fix)
            return
        present = {column for column, value in (row or {}).items() if value is not None}
        if row is not None and not any(columns <= present for columns in self.needs_columns):
            wanted = ", or ".join(" with ".join(f"`{column}`" for column in sorted(c)) for c in self.needs_columns)
            yield Problem(
                "data",
                f"{self.algorithm} needs rows with {wanted}; the first one has {', '.join(map(str, row)) or 'nothing'}",
                "map your columns to these names in `data:`, or choose another dataset",
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen initial policy is needed. Algorithms that compare against it override this."""
        return False

    @property
    def _models(self) -> Mapping[str, Companion]:
        """All models that workers hold, by the role that names them in messages."""
        return {"policy": Companion(self.policy, self.policy_head), **self.companions}

    @property
    def companions(self) -> Mapping[str, Companion]:
        """The other models of the run by role, e.g. ``critic``. Algorithms that have any override this."""
        return {}

    def build(self) -> BaseTrainer[Self]:
        """The trainer of this algorithm: the line that imports torch."""
        owner, limit_s = f"algorithm {self.algorithm or type(self).__name__}", self.plugins.import_timeout_s
        with (
            boundary(owner, passing=(Exception,)),
            deadline(f"importing {owner}", limit_s, setting="plugins.import_timeout_s"),
        ):
            trainer: BaseTrainer[Self] = EntryPoint("trainer", self.trainer, "nemorl").load()(self)
        return trainer
