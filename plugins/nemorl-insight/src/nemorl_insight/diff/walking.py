"""The walk through two runs: step by step, part by part, until they part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from nemorl_insight.diff.rollouts import RecordPair, StepRecords
from nemorl_insight.diff.run_files import RunFiles
from nemorl_insight.diff.settings import Setting, settings_between, unrecorded
from nemorl_insight.diff.stages import STAGES, Finding, KnownBy, Point, Stage, stage_of_metric
from nemorl_insight.diff.tensors import CheckpointPair, is_equal

OF_ROLLOUTS: frozenset[Stage] = frozenset({"data", "tokens", "rewards", "advantages"})
"""Parts of a step that only records know exactly."""
NO_RECORD = "not recorded (`records: {every: 1, groups: …}` keeps them)"
NO_CHECKPOINT = "no checkpoint of this step in both (`checkpoint: {every: 1, keep_every: 1}` keeps them)"
NOT_LOGGED = "not in both metrics.jsonl"


@dataclass(frozen=True)
class Walk:
    """Two runs, as far as they are known to agree."""

    first: RunFiles
    second: RunFiles
    settings: Sequence[Setting]
    """That differ."""
    findings: Sequence[Finding]
    """Of each step up to the first that differs, in order."""
    unrecorded: Sequence[str] = field(default=())
    """Records of settings that a run lacks."""

    @property
    def parting(self) -> Finding | None:
        """The first difference in what they computed."""
        return next((finding for finding in self.findings if finding.point is not None), None)

    @property
    def last_step(self) -> int:
        """That was compared; 0: none."""
        return max((finding.step for finding in self.findings), default=0)

    @property
    def differs(self) -> bool:
        return self.parting is not None or any(setting.counts for setting in self.settings)

    @property
    def suspects(self) -> list[Setting]:
        """Settings that may have made them part where they do: those that could show there and not before."""
        parting, order = self.parting, list(STAGES)
        serious = [setting for setting in self.settings if setting.counts]
        if parting is None:
            return serious
        is_first = parting.step <= min(finding.step for finding in self.findings)
        in_time = [
            setting
            for setting in serious
            if not is_first or setting.earliest is None or order.index(setting.earliest) <= order.index(parting.stage)
        ]
        return sorted(in_time, key=lambda one: -order.index(one.earliest) if one.earliest else 1)

    def earlier_unknown(self) -> list[Finding]:
        """Parts before the parting that are not known exactly: the runs may have parted there."""
        found = []
        for finding in self.findings:
            if finding.point is not None:
                break
            if not finding.is_exact:
                found.append(finding)
        return found


def walk(
    first: RunFiles,
    second: RunFiles,
    *,
    tolerance: float = 0.0,
    steps: Sequence[int] | None = None,
    parts: Collection[Stage] = tuple(STAGES),
) -> Walk:
    """Compare two runs up to the end of the first step that differs.

    Args:
        first: A run.
        second: Another.
        tolerance: Numbers this close are equal, relative to the larger or absolute.
        steps: Only these. Unset: all that both runs have.
        parts: Of each step, only these.
    """
    wanted = steps if steps is not None else _common_steps(first, second)
    findings: list[Finding] = []
    for step in wanted:
        findings += [found for found in findings_of(first, second, step, tolerance) if found.stage in parts]
        if any(finding.point is not None for finding in findings):
            break
    return Walk(first, second, settings_between(first, second), findings, unrecorded(first, second))


def _common_steps(first: RunFiles, second: RunFiles) -> list[int]:
    """Steps that both have anything of."""
    sides = [{*run.metrics, *run.checkpoints, *run.record_steps} for run in (first, second)]
    return sorted(sides[0] & sides[1])


def findings_of(first: RunFiles, second: RunFiles, step: int, tolerance: float) -> Iterator[Finding]:
    """Each part of a step, in order."""
    pair, damage = _records(first, second, step, tolerance)
    metrics = _metric_points(first, second, step, tolerance)
    stages: Sequence[Stage] = tuple(STAGES) if step > 0 else ("validation",)
    for stage in stages:
        of_metrics = metrics.get(stage, [])
        logged = stage in metrics
        if stage == "weights":
            yield _of_weights(first, second, step, tolerance, of_metrics, pair)
        elif stage == "validation":
            if logged:
                yield Finding(step, stage, "metrics", _first(of_metrics))
        elif not (first.samples or second.samples) and stage in (*OF_ROLLOUTS, "logprobs"):
            if (point := _first(of_metrics)) is not None:
                yield Finding(step, stage, "metrics", point)
        elif stage in ("loss", "gradient"):
            lacking = None if logged else NOT_LOGGED
            yield Finding(step, stage, "metrics" if logged else "nothing", _first(of_metrics), lacking)
        else:
            yield _of_rollouts(step, stage, pair, damage, of_metrics, logged=logged)


def _records(first: RunFiles, second: RunFiles, step: int, tolerance: float) -> tuple[RecordPair | None, str | None]:
    """The records of a step, or why they cannot be compared."""
    try:
        sides = [StepRecords.read(run.path, step) for run in (first, second)]
    except (ValueError, OSError) as error:
        return None, " ".join(str(error).split())
    one, other = sides
    if one is None or other is None:
        return None, None
    return RecordPair(one, other, tolerance), None


def _metric_points(
    first: RunFiles, second: RunFiles, step: int, tolerance: float
) -> dict[Stage, list[tuple[str, Point | None]]]:
    """By part of the step, each metric that both logged, and how it differs if it does."""
    ones, others = first.metrics.get(step, {}), second.metrics.get(step, {})
    found: dict[Stage, list[tuple[str, Point | None]]] = {}
    for name in [name for name in ones if name in others]:
        stage = stage_of_metric(name)
        if stage is not None:
            same = is_equal(ones[name], others[name], tolerance)
            point = None if same else Point(name, ones[name], others[name])
            found.setdefault(stage, []).append((name, point))
    return found


def _first(points: Sequence[tuple[str, Point | None]]) -> Point | None:
    return next((point for _, point in points if point is not None), None)


def _of_rollouts(
    step: int,
    stage: Stage,
    pair: RecordPair | None,
    damage: str | None,
    of_metrics: Sequence[tuple[str, Point | None]],
    *,
    logged: bool,
) -> Finding:
    by_metrics = _first(of_metrics)
    if pair is not None and pair.has(stage):
        point = pair.first_difference(stage)
        if point is None and by_metrics is not None:
            return Finding(step, stage, "metrics", by_metrics, "the samples that differ are not in both records")
        return Finding(step, stage, "records", point, pair.covers)
    why = damage or NO_RECORD
    if pair is not None and stage == "logprobs":
        why = "kept where a step computes them, or with `records.trainer_logprobs: true`"
    return Finding(step, stage, "metrics" if logged else "nothing", by_metrics, why)


def _of_weights(
    first: RunFiles,
    second: RunFiles,
    step: int,
    tolerance: float,
    of_metrics: Sequence[tuple[str, Point | None]],
    pair: RecordPair | None,
) -> Finding:
    """The learning rate comes before the update that it scales."""
    known_by: KnownBy = "metrics" if of_metrics else "nothing"
    if (point := _first(of_metrics)) is not None:
        return Finding(step, "weights", "metrics", point)
    paths = first.checkpoints.get(step), second.checkpoints.get(step)
    if paths[0] is None or paths[1] is None:
        after = pair.first_difference("weights") if pair is not None else None
        return Finding(step, "weights", "records" if after else known_by, after, NO_CHECKPOINT)
    checkpoints = CheckpointPair(paths[0], paths[1], tolerance)
    try:
        if (lacking := checkpoints.lacking()) is not None:
            return Finding(step, "weights", known_by, None, lacking)
        found = list(checkpoints.differences())
    except (ValueError, OSError) as error:
        return Finding(step, "weights", known_by, None, " ".join(str(error).split()))
    if not found:
        return Finding(step, "weights", "checkpoint")
    point = found[0].point
    more = f"; {len(found)} tensors differ" if len(found) > 1 else ""
    return Finding(step, "weights", "checkpoint", replace(point, detail=point.detail + more))
