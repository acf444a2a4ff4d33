"""BaseTrainer: the loop that every algorithm shares. Resume, sync, step, validate, log, save, stop.

An algorithm subclasses it and defines ``train_step``; see ``nemorl-grpo`` for the model to follow. What is *not* here:
how a batch is computed (backends), where it runs (ResourceManager), what a response is worth (environments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from nemorl.config.load import validate
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule
from nemorl.data import RowDataModule, to_prompts
from nemorl.deadlines import deadline
from nemorl.environments import Unscored
from nemorl.errors import NemorlError, StorageError, UsageError, WorkerLostError, boundary
from nemorl.evaluation import evaluate, planned_turns, sample_record
from nemorl.observe.console import Console
from nemorl.observe.heartbeat import heartbeat
from nemorl.observe.metrics import Metrics, values
from nemorl.observe.report import write_report
from nemorl.observe.timing import Timer
from nemorl.plugins.registry import restricted, use_registry
from nemorl.preflight import preflight
from nemorl.results import TrainResult
from nemorl.resumable import C, Progress, Resumable
from nemorl.rollout_stream import RolloutStream
from nemorl.rollouts import RolloutEngine, RolloutPlan
from nemorl.run import Run
from nemorl.seeding import derive_seed
from nemorl.sources import DataSource, RewardSource, as_environment, held_out_rows, open_data, require_sources
from nemorl.stopping import NOBODY_WATCHES, GracefulStop
from nemorl.types import Row, Samples

if TYPE_CHECKING:
    from nemorl.tensors import TokenBatch

SHOWN_SAMPLES = 8
"""Samples written to ``samples.jsonl`` per training step, taken from different groups where possible."""


class BaseTrainer(Resumable[C]):
    """Runs an algorithm. Subclasses define ``train_step`` and, if they need more, ``setup`` and ``validate``."""

    config_class: ClassVar[type[RunConfig]]
    """The algorithm's config; ``from_pretrained`` builds it."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.progress = Progress()
        self.history: list[dict[str, float]] = []
        self.stop_reason: str | None = None
        self.stream: RolloutStream | None = None
        self.is_scored = False
        """Whether an environment says what responses are worth."""
        self._epoch: int | None = None
        self.run: Run

    @classmethod
    def from_pretrained(cls, model: str, **knobs: Any) -> Self:
        """A trainer for a model by name or folder; ``knobs`` are fields of the algorithm's config."""
        return cls(validate(cls.config_class, {"model": model, **knobs}, source=cls.config_class.__name__))  # type: ignore[arg-type]

    # What an algorithm defines

    def setup(self) -> None:
        """Create what ``train_step`` needs, once, when the run's parts exist."""

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        """One step of the algorithm on one batch of rows."""
        raise NotImplementedError(f"{type(self).__name__} must define train_step()")

    @property
    def rollout_plan(self) -> RolloutPlan:
        """How a prompt becomes a group of samples. Algorithms that sample define it."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout_plan")

    @property
    def batch_size(self) -> int:
        """Rows per step."""
        raise NotImplementedError(f"{type(self).__name__} must define batch_size")

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """Metrics on held-out rows. By default: respond, score, average (the code path of ``nemorl eval``)."""
        if self.run.rollouts is None:
            return {}
        settings = self.config.validation
        evaluation = evaluate(
            self.run.rollouts,
            to_prompts(rows, self.run.tokenizer),
            num_generations=settings.num_generations,
            sampling=self.config.generation.sampling(temperature=settings.temperature),
            seed=derive_seed(self.config.seed, "validation"),
            max_turns=planned_turns(self),
        )
        self.record_samples(evaluation.samples, "validation", len(evaluation.samples))
        return evaluation.metrics

    # The loop

    @property
    def _owner(self) -> str:
        """Whose code the algorithm is, for errors."""
        return f"algorithm {self.config.algorithm or type(self).__name__}"

    def fit(
        self,
        dataset: DataSource | None = None,
        reward_fn: RewardSource | None = None,
        *,
        train_dataset: DataSource | None = None,
        val_dataset: DataSource | None = None,
        callbacks: Sequence[object] = (),
        resume: bool = False,
        from_step: int | None = None,
        console: Console | None = None,
    ) -> TrainResult:
        """Train until the configured end, a stop request or an error.

        Args:
            dataset: Rows, a dataset name, a dataset config or a ``DataModule``. Unset: ``config.data``.
            reward_fn: ``f(prompt, response)`` or an ``Environment``. Unset: ``config.environment``.
            train_dataset: Another name for ``dataset``.
            val_dataset: Held-out rows. Unset: ``config.validation.data``, or the dataset's validation split.
            callbacks: Objects with ``on_*`` methods (:class:`nemorl.callbacks.Callback`).
            resume: Continue the run in ``config.run_dir`` (or the default directory of this config) if there is one.
            from_step: Continue it from its checkpoint of this step; what is newer is set aside. Unset: from the newest.
            console: Where progress is shown. Unset: the terminal.

        Returns:
            Metrics, history and the run directory.
        """
        console = console or Console()
        source = dataset if dataset is not None else train_dataset if train_dataset is not None else self.config.data
        scorer = reward_fn if reward_fn is not None else self.config.environment
        require_sources(source, scorer, self.config)
        with (
            use_registry(restricted(self.config.plugins.policy())),
            heartbeat(console),
            self._opened(
                Run(self.config, resume=resume or from_step is not None, from_step=from_step, console=console),
                partial(self._build, source, val_dataset, scorer, callbacks),
            ),
            GracefulStop(self._on_signal),
            boundary(self._owner, passing=(Exception,)),
        ):
            self.setup()
            self.stream = self._open_stream()
            self.restore()
            self.sync_weights()
            self.run.console.start(self.run.path.name, self.total_steps)
            self.run.hooks.fire("on_fit_begin", trainer=self)
            if self.progress.step == 0 and self.config.validation.at_start:
                self.run_validation()

            lost: WorkerLostError | None = None
            while True:
                try:
                    if lost is not None:
                        self.recover(lost)
                    while self.progress.step < self.total_steps and self.stop_reason is None:
                        self._advance()
                    result = self._finish()
                except WorkerLostError as error:
                    if error is lost:  # recovery gave up: it may not restart workers again
                        raise
                    lost = error
                else:
                    return result

    @property
    def step(self) -> int:
        """Steps completed."""
        return self.progress.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: ``max_steps``, else the epochs asked for."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        if isinstance(self.run.data, RowDataModule):
            return self.run.data.steps(self.config.max_epochs)
        raise UsageError("a custom DataModule has no length that nemorl knows", fix="set max_steps")

    @property
    def planned_updates(self) -> int:
        """Optimizer steps of the whole run, for learning-rate decay."""
        return self.total_steps

    def stop(self, reason: str) -> None:
        """End the run after the current step: it is saved, and ``fit`` returns."""
        self.stop_reason = reason

    def _on_signal(self, name: str) -> None:
        self.stop(f"received {name}")
        self.run.console.message(f"{name}: finishing this step, then saving; once more to stop at once")

    @property
    def batches(self) -> DataModule:
        """Where the rows of the steps come from: the data, or rollouts of it that are finished."""
        return self.stream or self.run.data

    @property
    def rollouts(self) -> RolloutEngine:
        """Samples responses; only algorithms with ``needs_generation`` have one."""
        assert self.run.rollouts is not None, f"{type(self.config).__name__} says needs_generation = False"
        return self.run.rollouts

    def collect(self, rows: Sequence[Row]) -> Samples:
        """A scored group for each row of this step, as ``rollout_plan`` says."""
        if self.stream is not None:
            samples = self.stream.collect()
        else:
            prompts = to_prompts(rows, self.run.tokenizer)
            samples = self.rollouts.collect(prompts, self.rollout_plan, seed=self._rollout_seed(self.step))
        self.run.hooks.fire("on_rollout_end", trainer=self, step=self.step, samples=samples)
        self.record_samples(samples)
        return samples

    def _rollout_seed(self, batch: int) -> int:
        return derive_seed(self.config.seed, "rollout", batch)

    def _open_stream(self) -> RolloutStream | None:
        """Needed where rollouts run ahead of training, or not every group is trained on."""
        settings = self.config.rollouts
        if self.run.rollouts is None or (settings.mode == "sync" and self.rollout_plan.keep is None):
            return None
        return RolloutStream(
            self.run.data,
            self.run.rollouts.with_timer(Timer()),
            self.rollout_plan,
            max_staleness=settings.max_staleness if settings.mode == "async" else 0,
            max_batches=settings.max_batches_per_step,
            deadline_s=self.config.cluster.worker_timeout_s + settings.environment_timeout_s,
            seed_of=self._rollout_seed,
        )

    def sync_weights(self) -> None:
        """Give the generator the current policy (invariant 8: outside ``train_step`` it always has it)."""
        if self.run.rollouts is None:
            return
        with self.run.timer.phase("weight_sync"):
            self.run.generation.update_weights(self.run.resources.weight_handle(self.progress.step))
        if self.stream is not None:
            self.stream.publish(self.progress.step)
        self.run.hooks.fire("on_weights_synced", trainer=self, step=self.progress.step, version=self.progress.step)

    def run_validation(self) -> dict[str, float]:
        """Validate now and log it. Nothing happens without held-out rows."""
        rows = self.run.validation_rows
        if not rows:
            return {}
        with self.run.timer.phase("validation"):
            with boundary("the validation dataset"):
                read = [rows[i] for i in range(min(len(rows), self.config.validation.max_samples))]
            metrics = self.validate(read)
        seconds = self.run.timer.drain()["validation"]  # its generation is not that of the next step
        self.log(
            {f"validation/{name}": value for name, value in metrics.items()}
            | {"timing/validation/total_validation_time": seconds}
        )
        self.run.hooks.fire("on_validation_end", trainer=self, step=self.progress.step, metrics=metrics)
        return metrics

    def log(self, metrics: Mapping[str, float]) -> None:
        """Full-name metrics of the current step to every sink."""
        self.progress.latest.update(metrics)
        self.history.append({"step": self.progress.step, **metrics})
        self.run.log(metrics, self.progress.step)
        self.run.hooks.fire("on_log", trainer=self, step=self.progress.step, metrics=metrics)

    # Inside the loop

    def _announce_epoch(self, *, is_last: bool = False) -> None:
        """Fire the epoch events when an epoch ends or begins."""
        current, now = self._epoch, None if is_last else self.batches.epoch
        if current == now:
            return
        self._epoch = now
        if current is not None:
            latest = self.progress.latest
            step = {name.removeprefix("train/"): latest[name] for name in latest if name.startswith("train/")}
            self.run.hooks.fire("on_epoch_end", trainer=self, epoch=current, metrics={**latest, **step})
        if now is not None:
            self.run.hooks.fire("on_epoch_begin", trainer=self, epoch=now)

    def _advance(self) -> None:
        """One step, and what is due after it."""
        self._announce_epoch()
        with self.run.timer.phase("exposed_generation" if self.stream else "data_processing"):
            rows = self.batches.next_batch()
        metrics = self._timed_step(rows)
        self.run.hooks.fire("on_step_end", trainer=self, step=self.progress.step, metrics=metrics)
        if self._is_due(self.config.validation.every):
            self.run_validation()
        if self._is_due(self.config.checkpoint.every):
            self.save()
        if self.run.console.is_lost and self.stop_reason is None:
            self.stop(NOBODY_WATCHES)

    def _timed_step(self, rows: Sequence[Row]) -> dict[str, float]:
        self.progress.step += 1
        self.run.hooks.fire("on_step_begin", trainer=self, step=self.progress.step)
        with self.run.timer.phase("total_step_time"):
            metrics = values({**self.train_step(rows), **(self.stream.metrics() if self.stream else {})})
        timings = self.run.timer.drain()
        timings["total_step_time"] += timings.get("exposed_generation", 0.0) + timings.get("data_processing", 0.0)
        tokens = metrics.get("total_num_tokens", 0.0)
        self.progress.tokens += int(tokens)
        seconds, responses = timings["total_step_time"], metrics.get("num_valid_samples", len(rows))
        self.log(
            {f"train/{name}": value for name, value in metrics.items()}
            | {f"timing/train/{name}": value for name, value in timings.items()}
            | {"performance/tokens_per_sec": tokens / seconds, "performance/samples_per_sec": responses / seconds}
        )
        return metrics

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0 and self.progress.step < self.total_steps

    def _finish(self) -> TrainResult:
        self._announce_epoch(is_last=True)
        is_complete = self.progress.step >= self.total_steps
        latest = self.run.checkpoints.latest()
        if latest is None or latest.step != self.progress.step:
            if is_complete and self.config.validation.at_end:
                self.run_validation()
            self.save()
        if is_complete and self.config.checkpoint.export:
            self.run.policy.save_pretrained(self.run.path / "model")
        ending = "finished" if is_complete else "stopped"
        self.run.directory.event(ending, step=self.progress.step, reason=self.stop_reason)
        self.run.hooks.fire("on_fit_end", trainer=self, metrics=self.progress.latest)
        write_report(self.run.path, warn=self.run.warn)
        best = self.run.checkpoints.best()
        return TrainResult(
            dict(self.progress.latest),
            self.history,
            self.run.path,
            best.path if best is not None else None,
            self.progress.step,
            None if is_complete else self.stop_reason,
        )

    def record_samples(self, samples: Samples, split: str = "train", limit: int = SHOWN_SAMPLES) -> None:
        """Keep up to ``limit`` of these samples, evenly spread, in ``samples.jsonl``."""
        stride = max(1, len(samples) // limit)
        for sample in samples[::stride][:limit]:
            self.run.directory.samples.write(sample_record(sample, self.progress.step, split))

    @contextmanager
    def _opened(self, run: Run, build: Callable[[], None]) -> Iterator[None]:
        """The run with its parts for the length of the block; whatever ends it is recorded."""
        self.run = run
        try:
            build()
            yield
        except BaseException as error:
            with suppress(StorageError):  # on a full disk the error itself says so
                self.run.directory.event("failed", step=self.progress.step, error=f"{type(error).__name__}: {error}")
            self.run.hooks.fire("on_exception", trainer=self, error=error)
            with suppress(NemorlError):  # has an event of its own, and this error comes first
                self.run.close()
            raise
        self.run.close()

    def _build(self, source: Any, val_dataset: DataSource | None, scorer: Any, callbacks: Sequence[object]) -> None:
        """Build everything the run needs, in a directory that is already ours: a failure leaves an event there."""
        with boundary(self._owner, passing=(Exception,)):
            limit_s = self.config.plugins.build_timeout_s
            self.run.console.announce("reading the data and trying the reward")
            with deadline("building environment and dataset", limit_s, setting="plugins.build_timeout_s"):
                environment = as_environment(scorer)
                self.run.data = open_data(source, self.config, self.batch_size)
                held_out = held_out_rows(source, val_dataset, self.config)
            self.is_scored = environment is not None
            if environment is None and self.config.needs_generation:
                environment = Unscored()
            data = self.run.data
            row = data.first_row if isinstance(data, RowDataModule) and self.config.needs_generation else None
            preflight(self.config, self.run.path, environment, row, self.run.console.message)
            self.run.open(held_out, environment, callbacks, planned_updates=self.planned_updates)

    # For algorithms that compare policies

    def with_old_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``old_logprobs``: the training backend's own view before any update of this step."""
        with self.run.timer.phase("policy_and_reference_logprobs"):
            return batch.with_tokens(old_logprobs=self.run.policy.get_logprobs(batch))

    def with_reference_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``reference_logprobs``: the frozen initial policy's."""
        with self.run.timer.phase("policy_and_reference_logprobs"):
            return batch.with_tokens(reference_logprobs=self.run.policy.get_logprobs(batch, "reference"))
