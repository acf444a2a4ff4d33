"""Where the time of a whole run went, what was wasted, and the line that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nemorl_cli.report.efficiency.rates import STEP

PHASES: Mapping[str, tuple[str, ...]] = {
    "trained": ("policy_training", "critic_training"),
    "generated": ("generation",),
    "rollout_wait": ("exposed_generation",),
    "logprobs": ("policy_and_reference_logprobs", "teacher_logprob_inference", "values"),
    "reward_wait": ("reward_calculation",),
    "weight_sync": ("weight_sync",),
    "data": ("data_processing",),
    "saved": ("checkpointing",),
}
"""How a run spends its steps, and the timings that belong to it."""
WORDS: Mapping[str, str] = {
    "rollout_wait": "waited for rollouts",
    "logprobs": "computed log-probs",
    "reward_wait": "waited for rewards",
    "weight_sync": "synchronised weights",
    "data": "read data",
    "other": "did other things",
}
"""Those whose names are no words for people."""
SAVING = "timing/train/checkpointing"
VALIDATION = "timing/validation/total_validation_time"
WEIGHTS: Mapping[str, str] = {
    "padding_frac": "performance/computed_tokens",
    "rank_wait_frac": "timing/train/policy_training",
    "train_flops_per_gpu": "timing/train/policy_training",
    "train_fp_utilization": "timing/train/policy_training",
    "computed_fp_utilization": "timing/train/policy_training",
    "generation_tail_frac": "train/total_num_tokens",
    "average_token_imbalance": "timing/train/generation",
    "generator_idle_frac": STEP,
    "training_worker_idle_time_ratio": STEP,
    "tokens_per_sec_per_gpu": STEP,
}
"""Rates of steps whose mean over the run is of interest, and what a step weighs in it."""
SHOWN_FROM = 0.01
"""Shares of the time below this are not named in the line."""


@dataclass
class Totals:
    """Sums over the steps of a run."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each rate: weighted values, and weights"""

    def add(self, record: Mapping[str, float]) -> None:
        """One record of ``metrics.jsonl``."""
        if VALIDATION in record:
            self._spend("validated", record[VALIDATION])
        if STEP not in record:
            return
        spent = {
            phase: sum(record.get(f"timing/train/{name}", 0.0) for name in names) for phase, names in PHASES.items()
        }
        for phase, seconds in spent.items():
            self._spend(phase, seconds)
        outside = record.get(SAVING, 0.0)  # between this step and the one before
        self._spend("other", max(0.0, record[STEP] - (sum(spent.values()) - outside)))
        for name, by in WEIGHTS.items():
            value = record.get(f"performance/{name}")
            if value is not None:
                total, weight = self._sums.get(name, (0.0, 0.0))
                weighs = record.get(by, 0.0)
                self._sums[name] = (total + value * weighs, weight + weighs)

    @property
    def figures(self) -> dict[str, float]:
        """Shares of the time by activity (``trained_frac``, …), and means of the rates."""
        whole = sum(self.seconds.values())
        shares = {f"{phase}_frac": spent / whole for phase, spent in self.seconds.items() if whole}
        return {**shares, **{name: total / weight for name, (total, weight) in self._sums.items() if weight}}

    @property
    def line(self) -> str:
        """One line for people; empty before the first step.

        Example:
            >>> totals = Totals()
            >>> totals.add({STEP: 4.0, "timing/train/policy_training": 3.0, "timing/train/generation": 1.0})
            >>> totals.line
            'Efficiency: trained 75 % of the time, generated 25 %'
        """
        whole = sum(self.seconds.values())
        if not whole:
            return ""
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        named = [(WORDS.get(phase, phase), spent / whole) for phase, spent in ordered]
        parts = [f"{words} {percent(share)}" for words, share in named if share >= SHOWN_FROM]
        parts[0] += " of the time"
        return "; ".join(["Efficiency: " + ", ".join(parts), *self._waste(), *self._speed()])

    def _waste(self) -> Iterator[str]:
        figures = self.figures
        if (padding := figures.get("padding_frac")) is not None:
            yield f"{percent(padding)} of computed tokens were padding"
        if ranks := figures.get("rank_wait_frac"):
            yield f"ranks waited {percent(ranks)} of training for the fullest"
        if tail := figures.get("generation_tail_frac"):
            yield f"{percent(tail)} of generation's places were empty in its tail"
        if imbalance := figures.get("average_token_imbalance"):
            yield f"generators waited {percent(imbalance)} of generation for the fullest"
        if idle := figures.get("generator_idle_frac"):
            yield f"the generator was idle {percent(idle)}"

    def _speed(self) -> Iterator[str]:
        figures = self.figures
        if "train_flops_per_gpu" in figures:
            speed, share = figures["train_flops_per_gpu"], figures["train_fp_utilization"]
            busy = figures.get("computed_fp_utilization", share)
            why = "nothing was computed twice, or for rows that teach nothing"
            saved = f", and {share:.2f} times its peak in what it would take otherwise, as {why}" if share > 1 else ""
            of_peak = f"{percent(busy if share > 1 else share)} of its peak" if busy <= 1 else "as fast as was measured"
            yield f"training at {flops(speed)} per device, {of_peak}{saved}"
        if "tokens_per_sec_per_gpu" in figures:
            yield f"{figures['tokens_per_sec_per_gpu']:,.0f} tokens/s per device"

    def _spend(self, phase: str, seconds: float) -> None:
        if seconds:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def percent(share: float) -> str:
    """``12 %``, or ``0.4 %`` where whole percents would say nothing."""
    if 0 < share < 0.0005:
        return "less than 0.1 %"
    return f"{100 * share:.1f} %" if 0 < share < SHOWN_FROM else f"{100 * share:.0f} %"


def flops(tera: float) -> str:
    """A speed in the unit that suits it.

    Example:
        >>> flops(412.3), flops(0.0123)
        ('412 TFLOP/s', '12.3 GFLOP/s')
    """
    unit, factor = ("TFLOP/s", 1.0) if tera >= 1 else ("GFLOP/s", 1e3)
    return f"{tera * factor:.3g} {unit}"


def summed_up(metrics: Mapping[str, Mapping[int, float]]) -> Totals:
    """Totals of a run's records.

    Args:
        metrics: Name -> step -> value, as a report reads them.
    """
    totals = Totals()
    for step in sorted({step for values in metrics.values() for step in values}):
        totals.add({name: values[step] for name, values in metrics.items() if step in values})
    return totals
