"""A recorded step, made again in the present environment and in another one, and what differs.

Without a run: two steps of a tiny model, recorded by the present environment; the second is made again from the
checkpoint of the first, so that both sides begin with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl_cli.report.records.reading import read_records
from nemorl_cli.report.run_data import RunData

from nemorl_insight.doctor.upgrades.processes import Done
from nemorl_insight.doctor.upgrades.trials import Side

LOSS, GRADIENT = "train/loss", "train/grad_norm"
OF_SAMPLER, OF_TRAINER = "generation_logprobs", ("old_logprobs", "policy_logprobs")
RECORD_STEPS = 2


@dataclass(frozen=True)
class Numbers:
    """A step on two sides. Log-probs are in nats, of samples with equal tokens; loss and gradient are of the same
    samples: sampled alike, or taken from the record."""

    step: int
    samples: int
    equal_samples: int
    """Those whose tokens are the same."""
    generation_logprobs: float | None
    """Largest difference, of samples with equal tokens. ``None``: not recorded."""
    trainer_logprobs: float | None
    loss: tuple[float | None, float | None]
    """In the present environment and in the other."""
    grad_norm: tuple[float | None, float | None]

    @property
    def is_equal(self) -> bool:
        pairs = all(_gap(pair) in (None, 0.0) for pair in (self.loss, self.grad_norm))
        nats = all(value in (None, 0.0) for value in (self.generation_logprobs, self.trainer_logprobs))
        return self.samples == self.equal_samples and pairs and nats

    @property
    def largest(self) -> float:
        """Of the differences of log-probs in nats, of loss, and of the gradient's norm relative to it."""
        norm, base = _gap(self.grad_norm), abs(self.grad_norm[0] or 1.0) or 1.0
        relative = None if norm is None else norm / base
        return max(
            value or 0.0 for value in (self.generation_logprobs, self.trainer_logprobs, _gap(self.loss), relative)
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.is_equal, "largest": self.largest}

    def text(self) -> str:
        """What differs, in a line."""
        parts = [] if self.equal_samples == self.samples else [f"{self.equal_samples} of {self.samples} samples equal"]
        for name, value in (("sampler's", self.generation_logprobs), ("trainer's", self.trainer_logprobs)):
            parts += [f"{name} log-probs by {value:.2g} nats"] if value else []
        for name, pair in (("loss", self.loss), ("gradient norm", self.grad_norm)):
            parts += [f"{name} {pair[0]:.7g} -> {pair[1]:.7g}"] if _gap(pair) else []
        return ", ".join(parts) or "bit-equal"


def _gap(pair: tuple[float | None, float | None]) -> float | None:
    return None if pair[0] is None or pair[1] is None else abs(pair[0] - pair[1])


class StepError(Exception):
    """A step could not be made, on one side."""

    def __init__(self, what: str, done: Done, *, blames_version: bool) -> None:
        super().__init__(f"{what}: {done.error}")
        self.done, self.blames_version = done, blames_version
        """How it ended, and that it did in the environment of the other version alone."""


def record_step(folder: Path, training: str, generation: str, present: Side, *, ray: bool) -> Path:
    """Record the built-in run in a folder, unless it is there.

    Raises:
        StepError: the present environment cannot make it.
    """
    model, run = folder / "model", folder / "run"
    if last_step(run) == RECORD_STEPS:
        return run
    folder.mkdir(parents=True, exist_ok=True)
    made = present.run("-c", f"from nemorl_rl.models.tiny import write_tiny_model as w; w({str(model)!r})")
    if made.code != 0:
        raise StepError("writing the tiny model here", made, blames_version=False)
    config = folder / "step.yaml"
    replace_text(config, json.dumps(_config(model, training, generation, ray=ray)))
    done = present.nemorl("train", str(config), "--run-dir", str(run))
    if done.code != 0:
        raise StepError("recording the step here", done, blames_version=False)
    return run


def _config(model: Path, training: str, generation: str, *, ray: bool) -> dict[str, Any]:
    """GRPO that rewards two digits, which a random model writes now and then; everything is kept."""
    config: dict[str, Any] = {
        "algorithm": "grpo",
        "model": str(model),
        "policy": {
            "backend": training,
            "init": "random",
            "max_sequence_tokens": 32,
            "optimizer": {"lr": 5e-3},
            "max_grad_norm": 0.3,
        },
        "data": {"name": "arithmetic", "num_train": 40, "num_validation": 4},
        "environment": {"name": "format", "pattern": r".*\d.*\d.*"},
        "generation": {"backend": generation, "max_new_tokens": 8},
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 8,
        "max_steps": RECORD_STEPS,
        "checkpoint": {"every": 1, "keep_last": 10, "export": False},
        "validation": {"every": 0, "at_end": False},
        "records": {"groups": 4, "trainer_logprobs": True},
    }
    if ray:
        config["cluster"] = {"launcher": "ray", "gpus_per_node": 0, "workers_per_node": 1}
    return config


def compare_step(run: Path, step: int | None, new: Side, present: Side, scratch: Path) -> Numbers:
    """Make a step of a run again on both sides.

    Where they sample different tokens, the update is made once more on each from the recorded samples.

    Args:
        run: Its directory; read only.
        step: Unset: its last.
        new: The environment that is tried.
        present: The one it is compared with.
        scratch: A folder for replays. Those of the present environment are kept there for the next version.

    Raises:
        StepError: one of the sides cannot make it.
        UsageError: there is no run.
    """
    step = last_step(run) if step is None else step
    version = "present" if new.overlay is None else new.overlay.folder.name
    sides = {"present": present, version: new}
    both = [_replayed(run, step, side, scratch / name, name) for name, side in sides.items()]
    rows = list(_paired(both, step))
    equal = [_tokens(one) == _tokens(other) for one, other in rows]
    trained, trained_rows = both, [pair for pair, same in zip(rows, equal, strict=True) if same]
    if not all(equal):
        trained = [_replayed(run, step, side, scratch / f"{n}-trainer", n, "trainer") for n, side in sides.items()]
        trained_rows = list(_paired(trained, step))
    data = [RunData.load(folder) for folder in trained]
    loss, grad_norm = ([one.metrics.get(name, {}).get(step) for one in data] for name in (LOSS, GRADIENT))
    return Numbers(
        step=step,
        samples=len(rows),
        equal_samples=sum(equal),
        generation_logprobs=largest_difference([p for p, same in zip(rows, equal, strict=True) if same], (OF_SAMPLER,)),
        trainer_logprobs=largest_difference(trained_rows, OF_TRAINER),
        loss=(loss[0], loss[1]),
        grad_norm=(grad_norm[0], grad_norm[1]),
    )


def _replayed(run: Path, step: int, side: Side, folder: Path, name: str, only: str | None = None) -> Path:
    if folder.is_dir():
        return folder
    options = ["--only", only] if only is not None else []
    arguments = ("compare", "replay", str(run), "--step", str(step), "--output", str(folder), "--json", *options)
    done = side.nemorl(*arguments)
    if last_step(folder) != step:
        where = " in the present environment" if name == "present" else ""
        raise StepError(f"step {step}{where}", done, blames_version=name != "present")
    return folder


def _paired(folders: Sequence[Path], step: int) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The records of a step on both sides, sample by sample: by group and place in it, which end its name."""
    columns = ("sample_id", "sequences")
    tables = (read_records(folder, split="train", step=step, columns=columns) for folder in folders)
    first, second = ({tuple(row["sample_id"].rsplit("-", 2)[1:]): row for row in rows} for rows in tables)
    for key, row in first.items():
        yield row, second.get(key, {})


def last_step(run: Path) -> int:
    """The last step that a run has a metric of; 0: none, or there is no run."""
    return max((step for values in RunData.load(run).metrics.values() for step in values), default=0)


def _tokens(row: Mapping[str, Any]) -> list[Any]:
    return [sequence["token_ids"] for sequence in row.get("sequences") or ()]


def largest_difference(
    rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], fields: Collection[str]
) -> float | None:
    """The largest difference of two log-probs of a token; ``None`` where none were recorded."""
    found = [
        abs(one - other)
        for first, second in rows
        for ones, others in zip(first.get("sequences") or (), second.get("sequences") or (), strict=False)
        for field in fields
        for one, other in zip(ones[field] or (), others[field] or (), strict=False)
    ]
    return max(found, default=None)
