"""BaseTrainer: the loop that every algorithm shares. Resume, step, validate, log, save, stop.

An algorithm subclasses it and defines ``train_step``; one that samples subclasses ``nemorl_rl.RolloutTrainer``, which
is this and more. What is *not* here: how a batch is computed (backends), and where it runs (ResourceManager).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.process.stopping import NOBODY_WATCHES, GracefulStop
from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.load import validate
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule, DataSource, SizedDataModule
from nemorl.contracts.display import Display
from nemorl.errors import BackendError, ConfigError, ConfigIssue, UsageError, WorkerLostError, boundary
from nemorl.metrics import Metrics, as_numbers, values
from nemorl.resources.manager import ResourceManager
from nemorl.resources.preflight import launch_problems
from nemorl.resumable import C, Progress, Resumable
from nemorl.run import Run, TrainResult
from nemorl.session import Inputs, display_of, opened
from nemorl.storage.run_directory import RunDirectory
from nemorl.types import Row


class BaseTrainer(Resumable[C]):
    """Runs an algorithm. Subclasses define ``train_step`` and, if they need more, ``setup`` and ``validate``.

    >>> class Nothing(BaseTrainer):
    ...     batch_size = 8
    ...     def train_step(self, rows): return {"loss": Sum(0.0)}
    """

    config_class: ClassVar[type[RunConfig]]
    """The algorithm's config; ``from_pretrained`` builds it."""
    resources_class: ClassVar[type[ResourceManager]] = ResourceManager
    """Places the run's workers."""

    def __init__(self, config: C) -> None:
        self.config = config
        self._reset()
        self.directory: RunDirectory
        self.data: DataModule
        """Both are there before ``run`` is."""
        self.run: Run

    def _reset(self) -> None:
        """Forget the counters, the history and the stop reason of an earlier ``fit``."""
        self.progress = Progress()
        self.history: list[dict[str, float]] = []
        self._left_nodes = set()
        self.stop_reason: str | None = None
        self._epoch: int | None = None

    @classmethod
    def from_pretrained(cls, model: str, **knobs: Any) -> Self:
        """A trainer for a model by name or folder; ``knobs`` are fields of the algorithm's config."""
        return cls(validate(cls.config_class, {"model": model, **knobs}, source=cls.config_class.__name__))  # type: ignore[arg-type]

    @property
    def owner(self) -> str:
        """The name of the algorithm in errors."""
        return f"algorithm {self.config.algorithm or type(self).__name__}"

    # What an algorithm defines

    def setup(self) -> None:
        """Create what ``train_step`` needs, once, when the run's parts exist."""

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        """One step of the algorithm on one batch of rows."""
        raise NotImplementedError(f"{type(self).__name__} must define train_step()")

    @property
    def batch_size(self) -> int:
        """Rows per step."""
        raise NotImplementedError(f"{type(self).__name__} must define batch_size")

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """Metrics on held-out rows. By default: none."""
        return {}

    # The loop

    def fit(
        self,
        dataset: DataSource | None = None,
        *,
        train_dataset: DataSource | None = None,
        val_dataset: DataSource | None = None,
        callbacks: Sequence[object] = (),
        resume: bool = False,
        from_step: int | None = None,
        accept_changed_data: bool = False,
        console: Display | None = None,
    ) -> TrainResult:
        """Train until the configured end, a stop request or an error.

        Args:
            dataset: Rows, a dataset name, a dataset config or a ``DataModule``. Unset: ``config.data``.
            train_dataset: Another name for ``dataset``.
            val_dataset: Held-out rows. Unset: ``config.validation.data``, or the dataset's validation split.
            callbacks: Objects with ``on_*`` methods (``nemorl.Callback``).
            resume: Continue the run in ``config.run_dir`` (or the default directory of this config) if there is one.
            from_step: Continue it from its checkpoint of this step; what is newer is set aside. Unset: from the newest.
            accept_changed_data: Continue with other rows than the run has had so far. ``False`` refuses them.
            console: Where progress is shown. Unset: the terminal.

        Returns:
            Metrics, history and the run directory.
        """
        source = dataset if dataset is not None else train_dataset if train_dataset is not None else self.config.data
        if lacking := list(self.missing_inputs(source)):
            raise ConfigError(lacking, source=type(self.config).__name__)
        self._reset()
        with (
            display_of(console) as shown,
            RunDirectory.claim(self.config, tell=shown.message, resume=resume, from_step=from_step) as directory,
            opened(self, directory, shown, Inputs(source, val_dataset, callbacks, accept_changed_data)),
            GracefulStop(self._on_signal),
            boundary(self.owner, passing=(Exception,)),
        ):
            self._begin()
            return self._with_recovery(self._run_to_end)

    def _begin(self) -> None:
        """Restore the run, or begin it: all that precedes its next step."""
        self.run.own(self, "end_saving")
        self.setup()
        self.restore()
        self.sync_weights()
        self.run.console.start(self.run.path.name, self.total_steps)
        self.run.hooks.fire("on_fit_begin", trainer=self)
        if self.progress.step == 0 and self.config.validation.at_start:
            self.run_validation()

    def _run_to_end(self) -> TrainResult:
        while self.progress.step < self.total_steps and self.stop_reason is None:
            self._advance()
        return self._finish()

    def _with_recovery(self, work: Callable[[], TrainResult]) -> TrainResult:
        """``work``, once more from the newest checkpoint whenever training workers were lost meanwhile."""
        lost: WorkerLostError | None = None
        while True:
            try:
                if lost is not None:
                    self.recover(lost)
                return work()
            except WorkerLostError as error:
                if error is lost:  # recovery gave up: it may not restart workers again
                    raise
                lost = error

    @property
    def step(self) -> int:
        """Steps completed."""
        return self.progress.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: ``max_steps``, else the epochs asked for."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        if isinstance(self.data, SizedDataModule):
            return self.data.steps(self.config.max_epochs)
        raise UsageError("a custom DataModule has no length that nemorl knows", fix="set max_steps")

    @property
    def planned_updates(self) -> int:
        """Optimizer steps of the whole run, for learning-rate decay."""
        return self.total_steps

    def stop(self, reason: str) -> None:
        """End the run after the current step: it is saved, and ``fit`` returns."""
        self.stop_reason = reason

    @property
    def batches(self) -> DataModule:
        """The data module that gives the rows of the steps."""
        return self.data

    def next_rows(self) -> Sequence[Row]:
        """The rows of the next step."""
        with self.run.timer.phase("data_processing"):
            return self.batches.next_batch()

    def step_metrics(self, rows: Sequence[Row]) -> Metrics:
        """Metrics of ``train_step`` on these rows, and of what surrounds it."""
        return self.train_step(rows)

    def sync_weights(self) -> None:
        """Publish the current weights to what uses them outside ``train_step``: nothing, by default."""

    def run_validation(self) -> dict[str, float]:
        """Validate now and log it. Nothing happens without held-out rows."""
        held_out = self.run.held_out
        if held_out is None:
            return {}
        with self.run.timer.phase("validation"):
            metrics = held_out.measure(self.validate, self.config.validation.max_samples)
        seconds = self.run.timer.drain()["validation"]  # its generation is not that of the next step
        self.log(
            {f"validation/{name}": value for name, value in metrics.items()}
            | {"timing/validation/total_validation_time": seconds}
        )
        self.run.hooks.fire("on_validation_end", trainer=self, step=self.progress.step, metrics=metrics)
        return metrics

    def log(self, metrics: Mapping[str, float]) -> None:
        """Full-name metrics of the current step, with what hooks add to them, to every sink."""
        given: dict[str, float] = dict(metrics)
        self.run.hooks.fire("on_log", trainer=self, step=self.progress.step, metrics=given)
        record = as_numbers(given)
        self.progress.latest.update(record)
        self.history.append({**record, "step": self.progress.step})
        self.run.log(record, self.progress.step)

    def _on_signal(self, name: str) -> None:
        self.stop(f"received {name}")
        self.run.console.message(f"{name}: finishing this step, then saving; once more to stop at once")

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
        self.publish_checkpoint(wait=False)
        self._announce_epoch()
        metrics = self._timed_step(self.next_rows())
        self.run.hooks.fire("on_step_end", trainer=self, step=self.progress.step, metrics=metrics)
        if self._is_due(self.config.validation.every):
            self.run_validation()
        if self._is_due(self.config.checkpoint.every):
            self.save()
        if self.progress.step < self.total_steps:
            self.leave_drained_nodes()
        if self.run.console.is_lost and self.stop_reason is None:
            self.stop(NOBODY_WATCHES)

    def _timed_step(self, rows: Sequence[Row]) -> dict[str, float]:
        self.progress.step += 1
        self.run.hooks.fire("on_step_begin", trainer=self, step=self.progress.step)
        with self.run.timer.phase("total_step_time"):
            metrics = values(self.step_metrics(rows))
        self.run.resources.reached = max(self.run.resources.reached, self.progress.step)
        timings = self.run.timer.drain()
        timings["total_step_time"] += timings.get("exposed_generation", 0.0) + timings.get("data_processing", 0.0)
        tokens = metrics.get("total_num_tokens", 0.0)
        self.progress.tokens += int(tokens)
        seconds, responses = timings["total_step_time"], metrics.get("num_samples", len(rows))
        self.log(
            {n if n.startswith("performance/") else f"train/{n}": value for n, value in metrics.items()}
            | {f"timing/train/{name}": value for name, value in timings.items()}
            | {"performance/tokens_per_sec": tokens / seconds, "performance/samples_per_sec": responses / seconds}
        )
        return metrics

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0 and self.progress.step < self.total_steps

    def _finish(self) -> TrainResult:
        self._announce_epoch(is_last=True)
        is_complete = self.progress.step >= self.total_steps
        self.publish_checkpoint(wait=True)
        latest = self.run.checkpoints.latest()
        if latest is None or latest.step != self.progress.step:
            if is_complete and self.config.validation.at_end:
                self.run_validation()
            self.save()
            self.publish_checkpoint(wait=True)
        if is_complete:
            self._refuse_to_have_learnt_nothing()
        if is_complete and self.config.checkpoint.export:
            self.run.policy.save_pretrained(self.run.path / "model")
        ending = "finished" if is_complete else "stopped"
        self.run.directory.event(ending, step=self.progress.step, reason=self.stop_reason)
        self._warn_of_absent_metric()
        self.run.hooks.fire("on_fit_end", trainer=self, metrics=self.progress.latest)
        best = self.run.checkpoints.best()
        return TrainResult(
            dict(self.progress.latest),
            self.history,
            self.run.path,
            best.path if best is not None else None,
            self.progress.step,
            None if is_complete else self.stop_reason,
        )

    def _refuse_to_have_learnt_nothing(self) -> None:
        records = read_jsonl(self.directory.metrics.path)
        shares = [record["train/skipped_updates"] for record in records if "train/skipped_updates" in record]
        if shares and all(share == 1 for share in shares):
            what = f"nothing was learnt: the updates of all {len(shares)} steps were skipped, as no gradient was finite"
            raise BackendError(what, fix="lower policy.optimizer.lr; see the rewards in `nemorl view samples RUN`")

    def _warn_of_absent_metric(self) -> None:
        """Say so when the metric that ranks checkpoints has not occurred by the end."""
        metric, names = self.config.checkpoint.metric, self.progress.latest.keys()
        if metric is not None and metric not in names and names:
            closest = did_you_mean(metric, names) or "The newest checkpoint counts as the best."
            self.run.warn(f"checkpoint.metric: the run logged no {shown(metric)}. {closest}")

    # What comes before the loop

    def missing_inputs(self, source: DataSource | None) -> Iterator[ConfigIssue]:
        """Inputs that neither ``fit`` nor the config gave, as issues."""
        if source is None:
            yield ConfigIssue("data", "no dataset given", "pass one to fit(dataset=…) or set `data:`")

    def open_inputs(self) -> None:
        """Build what the run needs besides data and models, and may fail soon: nothing, by default."""

    def preflight(self) -> Iterator[ConfigIssue]:
        """Problems that would end the run later and can be known before anything is loaded."""
        yield from launch_problems(self.config, self.directory.path, self.directory.warn)

    def code_fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of the code that the user wrote for this run, by name: of none, by default."""
        return {}

    def own_hooks(self) -> Mapping[str, object]:
        """Hook objects that every run of this kind has, by name."""
        return {}

    def build_parts(self) -> None:
        """Build what the run needs beyond the models it trains: nothing, by default."""
