"""A replay in words."""

from __future__ import annotations

from collections.abc import Iterator

from nemorl_diff.numbers import is_equal
from nemorl_diff.replaying import Replay
from nemorl_diff.run_files import RunFiles
from nemorl_diff.stages import STAGES, stage_of_metric
from nemorl_diff.telling import point_text
from nemorl_diff.walking import Walk


def sentences(replay: Replay, found: Walk, tolerance: float) -> Iterator[str]:
    """Whether the step is bit-equal, else the first value that is not; what that rests on."""
    begins, parting = replay.begins_after, found.parting
    origin = f"from the checkpoint of step {begins}" if begins else "from the beginning of the run"
    half = f" by the {replay.only} alone" if replay.only else ""
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


def metric_rows(replay: Replay, tolerance: float) -> Iterator[tuple[str, float | None, float | None]]:
    """Metrics of the step that differ: those of the parts that were made again."""
    ones = replay.run.metrics.get(replay.step, {})
    others = RunFiles(replay.folder).metrics.get(replay.step, {})
    for name in [name for name in ones if name in others and stage_of_metric(name) in replay.parts]:
        if not is_equal(ones[name], others[name], tolerance):
            yield name, ones[name], others[name]
