"""``nemorl doctor RUN``: which kinds of input reach the model of a run, and what stands in the way of finding out.

The check is that of every run's first update (``nemorl_rl.audit.dead_inputs``). Here it gets the weights of the newest
checkpoint, or those that the run began with, and the episodes that the run recorded; where it recorded none, the first
batch that its algorithm makes, up to the update. The run is only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemorl.config.load import load_config
from nemorl.config.models import AuxiliaryModel
from nemorl.config.run import RunConfig
from nemorl.contracts.display import Display
from nemorl.errors import NemorlError, UsageError, boundary
from nemorl.resources.manager import ResourceManager
from nemorl.resources.policies import TrainingPolicy
from nemorl.storage.checkpoints import CheckpointManager
from nemorl.types import Samples
from nemorl_cli.report.records.media_files import read_media
from nemorl_cli.report.records.reading import FOLDER, RecordFile, read_table, record_files
from nemorl_cli.report.records.samples import sample_of
from nemorl_rl.audit.dead_inputs import WORDS, reached_inputs
from nemorl_rl.placement.tenant_resources import ProvenPolicy, TenantResources
from nemorl_tensors import TokenBatch

if TYPE_CHECKING:
    from nemorl.base.files.checkpoints import Checkpoint
    from nemorl.contracts import Loss
    from nemorl.metrics import Metrics
    from nemorl.trainer import BaseTrainer

Answer = Literal["reaches", "does_not_reach", "absent", "unknown"]
LOOKED_AT = 16
"""Episodes with an input that are read: four sequences of them are tried, some of which may not do."""
QUIET = (
    "loggers=[]",
    "validation.every=0",
    "validation.at_start=false",
    "validation.at_end=false",
    "checkpoint.every=0",
    "checkpoint.export=false",
)
"""Of a first batch: nothing is logged, validated or saved."""


@dataclass(frozen=True)
class Verdict:
    """On one kind of input."""

    answer: Answer
    rows: str = ""
    """Where it was looked for."""


@dataclass(frozen=True)
class InputsReport:
    """What was found of a run."""

    run: Path
    checkpoint: int | None = None
    """Whose weights; ``None``: those that the run began with."""
    inputs: Mapping[str, Verdict] = field(default_factory=dict)
    """By kind; empty where there is a problem."""
    problem: NemorlError | None = None
    """Why nothing could be found."""

    @property
    def ok(self) -> bool:
        """Nothing is known to be lost, and it could be looked for."""
        return self.problem is None and all(verdict.answer != "does_not_reach" for verdict in self.inputs.values())

    def as_dict(self) -> dict[str, Any]:
        """The object that docs/doctor.md describes."""
        found = {kind: {"answer": verdict.answer, "rows": verdict.rows} for kind, verdict in self.inputs.items()}
        problem = {"what": self.problem.message, "fix": self.problem.fix} if self.problem is not None else None
        parts = {"checkpoint": self.checkpoint, "inputs": found, "problem": problem}
        return {"run": str(self.run), "ok": self.ok, **parts}


def examine_inputs(run_dir: Path, overrides: Sequence[str], scratch: Path, display: Display) -> InputsReport:
    """Put other inputs in the place of those that a run's model was shown.

    Args:
        run_dir: Of the run.
        overrides: Changes of its config, as ``path=value``.
        scratch: An empty folder.
        display: Shows what happens.

    Raises:
        UsageError: It is no run directory.
    """
    if not (run_dir / "config.yaml").is_file():
        raise UsageError(f"{run_dir} is not a run directory (no config.yaml)", fix="give the path of a run")
    step = None
    try:
        with boundary(f"the model of {run_dir.name}"):
            config = load_config(run_dir / "config.yaml", overrides)
            checkpoint = CheckpointManager.of_run(run_dir, config).latest()
            if checkpoint is not None:
                checkpoint.verify()
                step = checkpoint.step
            if record_files(run_dir / FOLDER, split="train"):
                inputs = _of_records(run_dir, config, checkpoint, scratch)
            else:
                inputs = _of_first_batch(run_dir, overrides, checkpoint, scratch, display)
    except NemorlError as error:
        return InputsReport(run_dir, step, problem=error)
    return InputsReport(run_dir, step, inputs)


def _of_records(run_dir: Path, config: RunConfig, checkpoint: Checkpoint | None, scratch: Path) -> dict[str, Verdict]:
    """Of each kind, by the newest records that have it. The model is built where any have."""
    recorded, damaged = _newest_records(run_dir)
    elsewhere = Verdict("unknown", f"the records, {damaged} of whose files are damaged") if damaged else None
    found = {kind: elsewhere or Verdict("absent", "the records") for kind in WORDS}
    if not recorded:
        return found
    with closing(ResourceManager(config, scratch)) as resources:
        policy = resources.auxiliary_policy("policy", AuxiliaryModel(config.policy, config.policy_head), 1)
        _load(policy, checkpoint)
        for kind, (file, places) in recorded.items():
            samples = _samples(run_dir, file, places)
            seen = reached_inputs(policy, TokenBatch.from_samples(samples), config.policy_head)
            found[kind] = _verdict(seen.get(kind), f"the records of step {file.step}")
    return found


def _newest_records(run_dir: Path) -> tuple[dict[str, tuple[RecordFile, Sequence[int]]], int]:
    """Of each kind that any have: the newest file, and places of episodes in it. And how many files are damaged."""
    found: dict[str, tuple[RecordFile, Sequence[int]]] = {}
    damaged = 0
    for file in reversed(record_files(run_dir / FOLDER, split="train")):
        if len(found) == len(WORDS):
            break
        try:
            rows = read_table(file, ["media", "turns.list.element.author"]).to_pylist()
        except (ValueError, OSError):  # `nemorl runs verify` says which
            damaged += 1
            continue
        shown = [_kinds(row) for row in rows]
        for kind in WORDS.keys() - found.keys():
            if places := [place for place, kinds in enumerate(shown) if kind in kinds]:
                found[kind] = file, places[:LOOKED_AT]
    return found, damaged


def _kinds(row: Mapping[str, Any]) -> set[str]:
    """Of the inputs of a recorded episode."""
    authors = [turn["author"] for turn in row["turns"] or ()]
    place = authors.index("environment") if "environment" in authors else len(authors)
    is_told = "policy" in authors[place:]
    return {item["kind"] for item in row["media"] or ()} | ({"observation"} if is_told else set())


def _samples(run_dir: Path, file: RecordFile, places: Sequence[int]) -> Samples:
    rows = read_table(file).take(places).to_pylist()
    media = read_media(run_dir, (item for row in rows for item in row["media"] or ()))
    return Samples([sample_of(row, media) for row in rows])


def _load(policy: TrainingPolicy, checkpoint: Checkpoint | None) -> None:
    if checkpoint is not None:
        policy.load_checkpoint(checkpoint.path / "policy")


def _verdict(is_alive: bool | None, rows: str) -> Verdict:
    return Verdict("unknown" if is_alive is None else "reaches" if is_alive else "does_not_reach", rows)


class Examined(Exception):  # noqa: N818
    """Ends a run before its first update: what was to be found is found."""

    def __init__(self, found: Mapping[str, bool | None]) -> None:
        super().__init__("examined")
        self.found = found


def _of_first_batch(
    run_dir: Path, overrides: Sequence[str], checkpoint: Checkpoint | None, scratch: Path, display: Display
) -> dict[str, Verdict]:
    """Of each kind, by the batch of the first update that a run of the same config would make."""
    folder = scratch / "run"
    config = load_config(run_dir / "config.yaml", [*overrides, *QUIET, f"run_dir={folder}"], for_launch=True)
    try:
        examining(config, checkpoint).fit(console=display)
    except Examined as end:
        seen = {kind: _verdict(is_alive, "the first batch") for kind, is_alive in end.found.items()}
        return {kind: seen.get(kind, Verdict("absent", "the first batch")) for kind in WORDS}
    raise UsageError(
        f"{run_dir} recorded no episodes, and its algorithm makes no update from its first batch",
        fix="look at `nemorl report` of the run: it may have learnt nothing",
    )


def examining(config: RunConfig, checkpoint: Checkpoint | None) -> BaseTrainer[Any]:
    """The trainer of a config, which ends with :class:`Examined` where it would make its first update.

    Args:
        config: Of the run.
        checkpoint: Whose weights are examined. Unset: the initial ones.

    Raises:
        UsageError: Its models are placed by code of its own.
    """
    trainer: Any = config.build()
    resources: Any = trainer.resources_class
    if not issubclass(resources, TenantResources):
        raise UsageError(
            f"{config.algorithm} recorded no episodes and places its models itself",
            fix="`records: {every: 1}` keeps episodes of the next run, if it samples",
        )

    class Policy(ProvenPolicy):
        """Examines in the place of learning."""

        def train_step(self, minibatch: TokenBatch, loss: Loss) -> Metrics:
            _load(self, checkpoint)
            raise Examined(reached_inputs(self, minibatch, self.head))

    class Resources(resources):  # type: ignore[misc]
        """Has that policy."""

        policy_class = Policy

    class Examining(type(trainer)):  # type: ignore[misc]
        """Has those resources."""

        resources_class = Resources

    return Examining(config)  # type: ignore[no-any-return]
