"""Which of the differences between a good and a bad run, or which checkpoint of one run, makes a metric fall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemorl.errors import UsageError
from nemorl_cli.report.comparing.numbers import Contrast, Estimate

from nemorl_insight.diff.deltas import Delta
from nemorl_insight.diff.journal import Journal, Probe
from nemorl_insight.diff.probing import Evaluations, Measured, ShortRuns
from nemorl_insight.diff.searching import Outcome, first_bad, minimal


class BudgetSpent(Exception):  # noqa: N818
    """As many probes were made as were allowed."""


@dataclass
class Judge:
    """Tells by a metric whether a probe is like the good end or like the bad one; remembers in a journal."""

    journal: Journal
    metric: str
    budget: int
    """Probes that this call may make."""
    tell: Callable[[str], None]
    """Told of each probe that was made."""
    good: Estimate | None = None
    bad: Estimate | None = None
    turns: str = "falls"
    """Direction in which a metric gets worse."""

    def ends(self, probes: Sequence[tuple[str, str, Callable[[str], Measured]]], *, lower_is_better: bool) -> None:
        """Measure both ends.

        Args:
            probes: Of the good end and of the bad one: its key, what it is in words, and how to measure it.
            lower_is_better: The metric is bad when it rises.

        Raises:
            UsageError: an end has no value, or the metric does not tell them apart.
        """
        self.turns = "rises" if lower_is_better else "falls"
        estimates: list[Estimate] = []
        for (tried, words, measure), outcome in zip(probes, ENDS, strict=True):
            probe = self._made(tried, words, measure, lambda _, known=outcome: known, END[outcome])  # type: ignore[misc]
            if probe.measured.estimate is None:
                raise UsageError(
                    f"{words} gives no {self.metric}: {probe.measured.problem}", fix=f"see {self.journal.folder}"
                )
            estimates.append(probe.measured.estimate)
        self.good, self.bad = estimates
        contrast = Contrast(self.metric, self.good, self.bad)
        is_worse = contrast.difference > 0 if lower_is_better else contrast.difference < 0
        if contrast.verdict in ("same", "noise") or not is_worse:
            does = self.turns.removesuffix("s")
            how = f"does not {does}" if not is_worse else f"{self.turns} by no more than its noise"
            raise UsageError(
                f"{self.metric} {how} between both ends: {_value(self.good)} and {_value(self.bad)}",
                fix="give ends further apart (--steps, checkpoints), more --seeds or another --metric; where a rise is "
                "bad, --lower-is-better",
            )

    def outcome(self, tried: str, words: str, measure: Callable[[str], Measured]) -> Outcome:
        """Of a probe, made now or earlier.

        Raises:
            BudgetSpent: it would be one too many.
        """
        return self._made(tried, words, measure, self._judged).outcome

    def _made(
        self,
        tried: str,
        words: str,
        measure: Callable[[str], Measured],
        judge: Callable[[Measured], Outcome],
        meaning: str | None = None,
    ) -> Probe:
        if (known := self.journal.find(tried)) is not None:
            return known
        if self.budget <= 0:
            raise BudgetSpent
        self.budget -= 1
        number = len(self.journal.probes) + 1
        name = f"probe_{number:03}"
        measured = measure(name)
        outcome = judge(measured)
        found = f"no value ({measured.problem})" if measured.estimate is None else _value(measured.estimate)
        meant = meaning or {"holds": "as good", "falls": f"it {self.turns}"}.get(outcome, "which says nothing")
        probe = Probe(name, tried, outcome, f"{number}. {words}: {self.metric} {found}, {meant}", measured)
        self.journal.add(probe)
        self.tell(probe.text)
        return probe

    def _judged(self, measured: Measured) -> Outcome:
        """The end that it is nearer to."""
        assert self.good is not None, "ends are measured first"
        assert self.bad is not None, "ends are measured first"
        if measured.estimate is None:
            return "unresolved"
        to_good, to_bad = (abs(measured.estimate.mean - end.mean) for end in (self.good, self.bad))
        return "unresolved" if to_good == to_bad else "holds" if to_good < to_bad else "falls"


ENDS: Sequence[Outcome] = ("holds", "falls")
END = {"holds": "the good end", "falls": "the bad end"}


def _value(estimate: Estimate) -> str:
    error = f" ± {estimate.error:.2g}" if estimate.error is not None else ""
    return f"{estimate.mean:.4g}{error}"


def guilty_settings(runs: ShortRuns, judge: Judge, *, lower_is_better: bool) -> list[Delta]:
    """The fewest differences with which the metric falls.

    Raises:
        UsageError: both ends are alike.
        BudgetSpent: more probes are needed.
    """
    everything = tuple(range(len(runs.deltas)))

    def key(chosen: Sequence[int]) -> str:
        return "; ".join(runs.deltas[number].text for number in sorted(chosen)) or "none"

    ends = [
        (key(()), "the good run's settings", lambda name: runs.measure(name, ())),
        (key(everything), "all of the bad run's settings", lambda name: runs.measure(name, everything)),
    ]
    judge.ends(ends, lower_is_better=lower_is_better)

    def test(chosen: Sequence[int]) -> Outcome:
        return judge.outcome(key(chosen), f"with {key(chosen)}", lambda name: runs.measure(name, chosen))

    return [runs.deltas[number] for number in minimal(everything, test)]


def guilty_checkpoint(
    runs: Evaluations, steps: Sequence[int], judge: Judge, *, lower_is_better: bool
) -> tuple[int, int]:
    """The neighbouring checkpoints between which the metric falls.

    Args:
        runs: How a checkpoint is measured.
        steps: Of the checkpoints, ascending, from the good one to the bad one.
        judge: Of probes.
        lower_is_better: The metric is bad when it rises.

    Raises:
        UsageError: both ends are alike.
        BudgetSpent: more probes are needed.
    """

    def measure(step: int) -> Callable[[str], Measured]:
        return lambda name: runs.measure(name, step)

    ends = [(f"step {step}", f"the checkpoint of step {step}", measure(step)) for step in (steps[0], steps[-1])]
    judge.ends(ends, lower_is_better=lower_is_better)
    return first_bad(steps, lambda step: judge.outcome(f"step {step}", f"the checkpoint of step {step}", measure(step)))


def known_so_far(judge: Judge) -> str:
    """The state of knowledge when the budget is spent, in words."""
    fallen = [probe for probe in judge.journal.probes if probe.outcome == "falls"]
    fewest = min(fallen, key=lambda probe: len(probe.tried.split("; ")), default=None)
    return f"So far it {judge.turns} with: {fewest.tried}." if fewest is not None else "No probe has told anything yet."
