"""A walk through two runs in words, as a small table and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from nemorl_insight.diff.settings import Setting
from nemorl_insight.diff.stages import STAGES, Finding, Point
from nemorl_insight.diff.walking import Walk

SHOWN = 4
"""Settings in a sentence."""
KINDS = ("config", "plugins", "inputs", "libraries")
"""Of settings, in order."""


def first_difference(walk: Walk) -> str | None:
    """The name of what differs first, in the order of computation: a kind of setting, or a part of a step."""
    kinds = [setting.kind for setting in walk.settings if setting.counts]
    first = next((kind for kind in KINDS if kind in kinds), None)
    parting = walk.parting
    return first or (parting.stage if parting is not None else None)


def sentences(walk: Walk) -> Iterator[str]:
    """Where they part, why, and what is not known."""
    names = f"{walk.first.path} and {walk.second.path}"
    parting = walk.parting
    if parting is not None and parting.point is not None:
        yield f"{names} part at step {parting.step}, in the {STAGES[parting.stage]}: {point_text(parting.point)}."
    else:
        yield f"{names} {_agreement(walk)}"
    yield from _setting_sentences(walk)
    earlier = walk.earlier_unknown()
    if parting is not None and earlier:
        reasons = dict.fromkeys(str(finding.lacking) for finding in earlier)
        yield f"They may have parted before that, in what is not known: {_listed(earlier)}. Why: {'; '.join(reasons)}."


def _agreement(walk: Walk) -> str:
    steps = sorted({finding.step for finding in walk.findings if finding.step > 0})
    if not steps:
        return "have no step in common: nothing that they computed can be compared."
    ends = [run.last_step for run in (walk.first, walk.second)]
    longer = "" if ends[0] == ends[1] else f" The first has {ends[0]} steps, the second {ends[1]}."
    unknown = [finding for finding in walk.findings if not finding.is_exact]
    known = "computed the same" if not unknown else "agree in all that is known"
    hidden = f" Not known exactly: {_listed(unknown)}." if unknown else ""
    return f"{known} at {_steps_text(steps)}.{longer}{hidden}"


def _setting_sentences(walk: Walk) -> Iterator[str]:
    serious = [setting for setting in walk.settings if setting.counts]
    if not serious and walk.parting is not None:
        yield "Nothing in their config, plugins, inputs or libraries explains it."
    if serious and walk.parting is None:
        yield f"They differ in {_settings_text(serious)}."
    if serious and walk.parting is not None:
        suspects = walk.suspects
        others = [setting for setting in serious if setting not in suspects]
        if suspects:
            yield f"What may explain it: {_settings_text(suspects)}."
        if others:
            yield f"Different, but without effect so early: {_settings_text(others)}."
    neutral = [setting for setting in walk.settings if not setting.counts]
    if neutral:
        yield f"Different, and changing no result beyond rounding: {_settings_text(neutral)}."
    if walk.unrecorded:
        yield f"Not recorded in both: {', '.join(walk.unrecorded)}."


def _settings_text(settings: Sequence[Setting]) -> str:
    more = f"; and {len(settings) - SHOWN} more (--json)" if len(settings) > SHOWN else ""
    return "; ".join(f"{setting.kind} {setting.text}" for setting in settings[:SHOWN]) + more


def point_text(point: Point) -> str:
    """A difference: what, where, and both values.

    >>> point_text(Point("token", 412, 87, "train-3-0-1", 17))
    'token 17 of sample train-3-0-1 is 412 and 87'
    """
    detail = f" ({point.detail})" if point.detail else ""
    return f"{_where(point)} is {value_text(point.first)} and {value_text(point.second)}{detail}"


def _where(point: Point) -> str:
    what = point.quantity
    if point.token is not None:
        lead = f"token {point.token}"
        what = lead if point.quantity == "token" else f"{point.quantity} of {lead}"
    return f"{what} of sample {point.sample}" if point.sample else what


def value_text(value: Any) -> str:
    """A number with all of its digits, a text in quotes, and what is missing as that."""
    if value is None:
        return "missing"
    return repr(value) if not isinstance(value, str) else repr(value if len(value) <= 60 else f"{value[:60]}…")


def rows(walk: Walk) -> Iterator[tuple[str, str, str, str, str]]:
    """(part, steps known exactly, steps known by means, steps not known, verdict) of each part of a step."""
    for kind in KINDS:
        count = sum(setting.kind == kind and setting.counts for setting in walk.settings)
        lacking = kind in walk.unrecorded or (
            kind == "inputs" and any(one.startswith("the ") for one in walk.unrecorded)
        )
        known = "not recorded" if lacking else "equal"
        yield kind, "", "", "", f"differs ({count})" if count else known
    for stage, title in STAGES.items():
        found = [finding for finding in walk.findings if finding.stage == stage]
        if not found:
            continue
        exact = [finding.step for finding in found if finding.is_exact]
        means = [finding.step for finding in found if not finding.is_exact and finding.known_by != "nothing"]
        nothing = [finding.step for finding in found if finding.known_by == "nothing" and not finding.is_exact]
        differing = next((finding for finding in found if finding.point is not None), None)
        verdict = "equal" if exact or means else "not known"
        if differing is not None:
            verdict = f"differs at step {differing.step}"
        yield title, ranges(exact), ranges(means), ranges(nothing), verdict


def step_rows(walk: Walk) -> Iterator[tuple[str, str, str, str, str]]:
    """(part, known by, verdict, value, other value) of each part of the last step that was compared."""
    for finding in walk.findings:
        if finding.step == walk.last_step:
            point = finding.point
            verdict = "equal" if finding.known_by != "nothing" else "not known"
            if point is not None:
                verdict = f"differs in {_where(point)}"
            elif finding.lacking is not None and finding.known_by == "metrics":
                verdict = "equal in its metrics"
            values = (value_text(point.first), value_text(point.second)) if point is not None else ("", "")
            yield STAGES[finding.stage], finding.known_by, verdict, *values


def ranges(steps: Sequence[int]) -> str:
    """Whole numbers, neighbours together.

    >>> ranges([1, 2, 3, 7])
    '1-3, 7'
    """
    parts = []
    for _, group in groupby(enumerate(sorted(set(steps))), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(parts)


def _steps_text(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {ranges(steps)}"


def _listed(findings: Sequence[Finding]) -> str:
    """``sampled tokens of steps 2-4``, part by part."""
    by_stage: dict[str, list[int]] = {}
    for finding in findings:
        by_stage.setdefault(STAGES[finding.stage], []).append(finding.step)
    return ", ".join(f"{title} of {_steps_text(steps)}" for title, steps in by_stage.items())


def as_data(walk: Walk, tolerance: float) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "first": str(walk.first.path),
        "second": str(walk.second.path),
        "tolerance": tolerance,
        "differs": walk.differs,
        "first_difference": first_difference(walk),
        "parting": None if walk.parting is None else _finding_data(walk.parting),
        "settings": [_setting_data(setting) for setting in walk.settings],
        "suspects": [setting.text for setting in walk.suspects],
        "unrecorded": list(walk.unrecorded),
        "steps": steps_data(walk),
        "text": list(sentences(walk)),
    }


def steps_data(walk: Walk) -> list[dict[str, Any]]:
    """Each compared part of each step."""
    return [_finding_data(finding) for finding in walk.findings]


def _finding_data(finding: Finding) -> dict[str, Any]:
    point: Point | None = finding.point
    return {
        "step": finding.step,
        "part": finding.stage,
        "equal": None if point is None and finding.known_by == "nothing" else point is None,
        "known_by": finding.known_by,
        "lacking": finding.lacking,
        "difference": None if point is None else asdict(point),
    }


def _setting_data(setting: Setting) -> dict[str, Any]:
    difference = setting.difference
    return {
        "kind": setting.kind,
        "key": difference.key,
        "first": difference.first,
        "second": difference.second,
        "counts": setting.counts,
    }
