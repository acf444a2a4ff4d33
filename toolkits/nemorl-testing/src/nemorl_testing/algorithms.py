"""Checks of algorithms: a small run finishes, and one that was killed ends as if it had not been."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemorl.config.load import validate
from nemorl.config.run import RunConfig
from nemorl.contracts.display import Silence
from nemorl.errors import NemorlError
from nemorl.types import Score
from nemorl_rl.callbacks import Callback
from nemorl_rl.config import RolloutRunConfig

from nemorl_testing.kit import NotApplicable, Subject, expect, slow
from nemorl_testing.updates import Updates

STEPS = 3
ROWS = [
    {
        "prompt": f"{a}+{b}=",
        "answer": str(a + b),
        "response": str(a + b),
        "chosen": str(a + b),
        "rejected": str(a * b + 7),
    }
    for a in range(2, 6)
    for b in range(2, 6)
]
"""Sums with every column that a text algorithm may want."""
WHOLE: Mapping[str, Any] = {"microbatch_tokens": 1_000_000}
STEP_TOLERANCE = 1e-4
"""Relative difference of losses and gradient norms of one step that are sums in another order."""
SMALL: Mapping[str, Any] = {
    "max_steps": STEPS,
    "policy": {"optimizer": {"lr": 1e-3}, "max_sequence_tokens": 64},
    "generation": {"max_new_tokens": 6},
    "validation": {"every": 0, "at_end": False},
    "checkpoint": {"every": 1},
    "cluster": {"gpus_per_node": 0},
}


class _KilledError(NemorlError):
    """Ends a run in the middle of a step: nothing is saved, as if the process had been killed."""


class _KillAt(Callback):
    essential = True  # its error ends the run

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, trainer: Any, step: int) -> None:
        if step == self.step:
            raise _KilledError("killed by the check")


class _Unpublished(Callback):
    """Counts the updates of the policy that the generator has not heard of at the end of each step."""

    def __init__(self) -> None:
        self.updates = 0
        self.at_end: dict[int, int] = {}

    def on_fit_begin(self, trainer: Any) -> None:
        trainer.run.policy.train_step = partial(self._train_step, trainer.run.policy.train_step)

    def on_weights_synced(self, trainer: Any, step: int, version: int) -> None:
        self.updates = 0

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.at_end[step] = self.updates

    def _train_step(self, train_step: Callable[..., Any], batch: Any, loss: Any) -> Any:
        self.updates += 1
        return train_step(batch, loss)


class _Spiller(Callback):
    """Has every update of a run see NaN wherever a field of its batch is masked."""

    def __init__(self) -> None:
        self.fields: set[str] = set()

    def on_fit_begin(self, trainer: Any) -> None:
        for policy in trainer.run.learners.values():
            policy.train_step = partial(self._train_step, policy.train_step)

    def _train_step(self, train_step: Callable[..., Any], batch: Any, loss: Any) -> Any:
        import torch

        spoilt = {}
        for name, values in batch.at_hand().token_fields.items():
            if values.is_floating_point():
                mask = batch.mask.reshape(-1, *[1] * (values.ndim - 1))
                spoilt[name] = torch.where(mask, values, torch.nan)
        self.fields |= spoilt.keys()
        return train_step(batch.with_tokens(**spoilt), loss)


@dataclass
class _SmallRun:
    """A finished run that several checks look at."""

    result: Any
    unpublished: dict[int, int]
    """Step -> updates that the generator had not heard of when it ended."""

    def shutdown(self) -> None:
        """Nothing is alive in it."""


def run_config(subject: Subject, **changes: Any) -> RunConfig:
    """The author's options over a small run."""
    from nemorl_testing.models import tiny_model

    model = {"model": str(subject.settings.model or tiny_model())}
    samples = issubclass(subject.config_class, RolloutRunConfig)
    small = SMALL if samples else {name: value for name, value in SMALL.items() if name != "generation"}
    options = _merged(_merged(small, model), _merged(subject.options, changes))
    config: RunConfig = validate(subject.config_class, options)
    return config


def check_trainer_belongs_to_the_config(subject: Subject) -> None:
    """``trainer`` names a BaseTrainer of this config; ``algorithm`` is the entry point's name. (DESIGN 5)"""
    from nemorl.trainer import BaseTrainer

    trainer = subject.config.build()
    expect(isinstance(trainer, BaseTrainer), f"{type(trainer)!r} does not derive from nemorl.BaseTrainer")
    expect(trainer.config_class is subject.config_class, f"config_class is {trainer.config_class!r}")
    expect(subject.config.algorithm == subject.entry.name, f"algorithm = {subject.config.algorithm!r}")


def check_small_run_finishes(subject: Subject) -> None:
    """Three steps on a tiny model end with finite metrics and a complete run directory. (DESIGN 8)"""
    result = _small_run(subject).result
    expect(result.steps == STEPS and result.stopped is None, f"{result.steps} steps, stopped: {result.stopped}")
    records = [record for record in result.history if any(name.startswith("train/") for name in record)]
    expect(len(records) == STEPS, f"{len(records)} records of training metrics for {STEPS} steps")
    for record in records:
        bad = {name: value for name, value in record.items() if not math.isfinite(value)}
        expect(not bad, f"metrics of step {record['step']} are not finite: {bad}")
    for name in ("config.yaml", "metrics.jsonl", f"checkpoints/step_{STEPS:06d}/manifest.json", "model/config.json"):
        expect((result.run_dir / name).is_file(), f"the run directory has no {name}")


def check_run_learns_something(subject: Subject) -> None:
    """The weights after three steps are not the weights before. (DESIGN 9)"""
    from nemorl_testing.models import load_reference

    run_dir = _small_run(subject).result.run_dir
    before = load_reference(subject.config.policy.model_name).state_dict()
    after = load_reference(run_dir / "model").state_dict()
    expect(any(not after[name].equal(before[name]) for name in before), "no weight changed")


def check_generator_has_the_weights_of_each_step(subject: Subject) -> None:
    """``train_step`` ends with ``sync_weights()``: the next rollout samples from the new weights. (DESIGN 7.8)"""
    if not issubclass(subject.config_class, RolloutRunConfig):
        raise NotApplicable("this algorithm samples nothing")
    for step, updates in _small_run(subject).unpublished.items():
        expect(
            updates == 0,
            f"step {step} ended and the generator lacked the weights of the last {updates} updates: "
            "call self.sync_weights() after the last update of train_step",
        )


def check_microbatches_change_nothing(subject: Subject) -> None:
    """Loss and gradient of each model's updates are the same whole or one sequence at a time: a loss only adds what
    ``loss_weights`` weigh, and divides by nothing of its own. (DESIGN 7.5)"""
    whole, parts = first_step(subject).numbers, _one_step(subject, "parts", {"microbatch_tokens": 1}).numbers
    for name in whole:
        expect(
            _close(whole[name], parts[name]),
            f"{name} is {whole[name]} in one microbatch and {parts[name]} with one sequence in each",
        )


def check_garbage_in_masked_slots_changes_nothing(subject: Subject) -> None:
    """What the batch's fields hold where the mask is False, NaN say, reaches neither loss nor gradient. (DESIGN 7.6)"""
    spiller = _Spiller()
    clean = first_step(subject).numbers
    dirty = _one_step(subject, "dirty", WHOLE, spiller).numbers
    if not spiller.fields:
        raise NotApplicable("its batches have no fields of numbers")
    for name in clean:
        expect(
            _close(clean[name], dirty[name]),
            f"with NaN in the masked slots of {', '.join(sorted(spiller.fields))}, {name} is {dirty[name]}, "
            f"without {clean[name]}: choose with torch.where(batch.mask, …) before any arithmetic",
        )


@slow
def check_killed_run_resumes_as_if_nothing_happened(subject: Subject) -> None:
    """A run that is killed and resumed ends with the same weights, bit for bit, and the same metrics. (DESIGN 7.9)"""
    straight = fit(subject, subject.folder / "straight")
    folder = subject.folder / "killed"
    try:
        fit(subject, folder, callbacks=[_KillAt(STEPS)])
    except _KilledError:
        pass
    else:
        expect(False, "on_step_begin was not called for the last step")
    resumed = fit(subject, folder, resume=True)
    expect(resumed.steps == STEPS, f"the resumed run ended after {resumed.steps} steps")
    last = [_results(run.history[-1]) for run in (straight, resumed)]
    expect(last[0] == last[1], f"the last step's metrics differ: {_changes(*last)}")
    for path in sorted((straight.run_dir / "model").glob("*.safetensors")):
        same = path.read_bytes() == (resumed.run_dir / "model" / path.name).read_bytes()
        expect(same, f"{path.name} of the resumed run differs from that of the uninterrupted one")


@slow
def check_same_seed_gives_the_same_run(subject: Subject) -> None:
    """Two runs of one config compute the same; another seed computes something else. (DESIGN 6)"""
    runs = [fit(subject, subject.folder / name) for name in ("one", "two")]
    other = fit(subject, subject.folder / "three", seed=7)
    first, second, third = (_results(run.history[-1]) for run in (*runs, other))
    expect(first == second, f"the last step's metrics differ: {_changes(first, second)}")
    expect(first != third, "seed 7 gives exactly the metrics of the default seed: the seed is not used")


def _small_run(subject: Subject) -> _SmallRun:
    if "small run" not in subject.shared:
        unpublished = _Unpublished()
        result = fit(subject, subject.folder / "run", callbacks=[unpublished])
        subject.shared["small run"] = _SmallRun(result, unpublished.at_end)
    found: _SmallRun = subject.shared["small run"]
    return found


def first_step(subject: Subject) -> Updates:
    """Those of the first step of a run, each in one microbatch."""
    if "first step" not in subject.shared:
        subject.shared["first step"] = _one_step(subject, "whole", WHOLE)
    found: Updates = subject.shared["first step"]
    return found


def _one_step(subject: Subject, name: str, policy: Mapping[str, Any], *callbacks: Callback) -> Updates:
    updates = Updates()
    changes: dict[str, Any] = {"max_steps": 1, "checkpoint": {"every": 0}, "policy": policy}
    fit(subject, subject.folder / name, callbacks=[*callbacks, updates], **changes)
    return updates


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=STEP_TOLERANCE, abs_tol=STEP_TOLERANCE)


def fit(
    subject: Subject,
    run_dir: Path,
    *,
    resume: bool = False,
    callbacks: Any = (),
    reward_fn: Callable[..., Any] | None = None,
    **changes: Any,
) -> Any:
    """The result of a run. Its rewards are of ``reward_fn``, or the author's, where it takes any."""
    config = run_config(subject, run_dir=run_dir, **changes)
    trainer, given = config.build(), dict[str, Any]()
    if isinstance(config, RolloutRunConfig) and list(config.reward_problems(None, "")):
        given["reward_fn"] = reward_fn or subject.settings.reward_fn or _share_of_digits
    return trainer.fit(
        list(subject.settings.rows or ROWS),
        **given,
        callbacks=callbacks,
        resume=resume,
        console=Silence(),
    )


def _share_of_digits(prompt: str, response: str) -> Score:
    """In two parts, for algorithms that take several rewards."""
    share = sum(character.isdigit() for character in response) / max(1, len(response))
    low = sum(character in "01234" for character in response) / max(1, len(response))
    return Score(share, {"low_digits": low, "high_digits": share - low})


NOT_COMPUTED = ("timing/", "performance/", "system/")
"""Metrics of how long a run took and of the machine."""


def _results(record: Mapping[str, float]) -> dict[str, float]:
    """Metrics without the timings."""
    return {name: value for name, value in record.items() if not name.startswith(NOT_COMPUTED)}


def _changes(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (one.get(name), other.get(name)) for name in sorted({*one, *other}) if one.get(name) != other.get(name)
    }


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on ``base``, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        is_nested = isinstance(below, Mapping) and isinstance(value, Mapping) and "name" not in value
        merged[key] = _merged(below, value) if is_nested else value  # type: ignore[arg-type]
    return merged
