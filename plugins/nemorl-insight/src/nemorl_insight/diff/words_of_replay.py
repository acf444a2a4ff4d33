"""A replay in words."""

from __future__ import annotations

from collections.abc import Iterator

from nemorl_insight.diff.replaying import Replay
from nemorl_insight.diff.stages import STAGES, stage_of_metric
from nemorl_insight.diff.telling import point_text
from nemorl_insight.diff.tensors import is_equal
from nemorl_insight.diff.walking import Walk


def sentences(replay: Replay, before: Walk | None, found: Walk, tolerance: float) -> Iterator[str]:
    """Whether the step is bit-equal, else the first value that is not; what that rests on.

    Args:
        replay: The step.
        before: The steps before it, where they were made by themselves.
        found: The step.
        tolerance: With which they were compared.
    """
    begins, parting = replay.begins_after, found.parting
    origin = f"from the checkpoint of step {begins}" if begins else "from the beginning of the run"
    half = f" by the {replay.half} alone" if replay.half else ""
    half = " by scoring the recorded tokens" if replay.scores else half
    changes = f" with {', '.join(replay.changes)}" if replay.changes else ""
    what = f"Step {replay.step} of {replay.run.path}, made again{half} {origin}{changes}"
    if parting is not None and parting.point is not None:
        earlier = f" at step {parting.step}" if parting.step != replay.step else ""
        yield f"{what}, differs first{earlier} in the {STAGES[parting.stage]}: {point_text(parting.point)}."
    else:
        exact = [STAGES[one.stage] for one in found.findings if one.is_exact and one.step == replay.step]
        equal = f"equal within {tolerance:g}" if tolerance else "bit-equal"
        yield f"{what}, is {equal} in {', '.join(exact)}." if exact else f"{what}, has nothing to be compared with."
    if replay.half != replay.only:
        yield "Its samples are those of the record: the rollouts of this run ran beside training."
    first = before.parting if before is not None else None
    if first is not None and first.point is not None:
        yield (
            f"The steps before it, made again as the run made them, differ already at step {first.step} in the "
            f"{STAGES[first.stage]}: {point_text(first.point)}. What is said of step {replay.step} follows from that "
            "as well."
        )
    for reason, parts in _unknown(replay, found).items():
        yield f"Not known exactly: {', '.join(parts)}; {reason}."
    if replay.is_foreign:
        yield "The update is not compared: the optimizer's state does not pass from one backend to another."
    plugins = [setting.text for setting in found.settings if setting.counts and setting.kind != "config"]
    if plugins and not replay.changes:
        yield f"Installed is something else than what the run used: {'; '.join(plugins[:4])}."


def _unknown(replay: Replay, found: Walk) -> dict[str, list[str]]:
    """Why, and which parts of the step."""
    reasons: dict[str, list[str]] = {}
    for finding in found.findings:
        if finding.step == replay.step and finding.lacking is not None and finding.point is None:
            reasons.setdefault(finding.lacking, []).append(STAGES[finding.stage])
    return reasons


def metric_rows(replay: Replay, found: Walk, tolerance: float) -> Iterator[tuple[str, float | None, float | None]]:
    """Metrics that differ at the last step that was compared: those of the parts that were made again."""
    ones, others = (run.metrics.get(found.last_step, {}) for run in (found.first, found.second))
    for name in [name for name in ones if name in others and stage_of_metric(name) in replay.parts]:
        if not is_equal(ones[name], others[name], tolerance):
            yield name, ones[name], others[name]
