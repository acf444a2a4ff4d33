"""Predicted beside measured: a run's ``timing/*`` metrics against its plan, and the efficiencies that would have been
right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError
from nemorl_rl.planning.memory.layouts import as_overrides, present
from nemorl_rl.planning.memory.reading import EXPECTED, Lengths, Sizes, asked_for, fleet_of, scene_of
from nemorl_rl.planning.memory.scene import Scene
from nemorl_rl.planning.memory.work import Work

from nemorl_insight.plan.candidates import judged
from nemorl_insight.plan.efficiencies import Efficiencies, starting_efficiencies
from nemorl_insight.plan.seconds import StepTime

if TYPE_CHECKING:
    from nemorl_cli.report.run_data import RunData
    from nemorl_rl.planning.devices import Fleet

TIMINGS: Mapping[str, tuple[str, ...]] = {
    "generation": ("prefill", "decoding"),
    "policy_and_reference_logprobs": ("old log-probs", "reference log-probs"),
    "values": ("critic scoring",),
    "teacher_logprob_inference": ("teacher scoring",),
    "policy_training": ("training",),
    "critic_training": ("critic training",),
    "weight_sync": ("weight sync",),
}
"""``timing/train/<name>`` -> the phases that it measures."""
BUSY = "performance/generator_busy_s"
"""Of asynchronous rollouts: from one step to the next a generator that does not fall behind samples one step's."""
FIRST_STEPS = 2
"""Left out where there are more: they build, compile and allocate."""


@dataclass(frozen=True)
class Comparison:
    """A run beside its plan."""

    predicted: Mapping[str, float]
    """Seconds by the name of the timing"""
    measured: Mapping[str, float]
    """Medians of the same"""
    refitted: Efficiencies
    lengths: Lengths
    """Of the run's sequences"""
    fleet: Fleet
    """That it was planned for"""

    def rows(self) -> list[tuple[str, float, float, float]]:
        """(phase, predicted s, measured s, measured / predicted) of those that were measured."""
        return [
            (name, self.predicted[name], seconds, seconds / self.predicted[name])
            for name, seconds in self.measured.items()
            if self.predicted.get(name, 0.0) > 0
        ]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        phases = {
            name: {"predicted_s": round(planned, 4), "measured_s": round(seconds, 4), "ratio": round(ratio, 3)}
            for name, planned, seconds, ratio in self.rows()
        }
        return {"phases": phases, "efficiencies": asdict(self.refitted)}

    def show(self) -> None:
        """Print the table and what was refitted."""
        from nemorl_cli.terminal import print_table, say

        rows = [
            (name, f"{planned:.3g}", f"{seconds:.3g}", f"{ratio:.2f}") for name, planned, seconds, ratio in self.rows()
        ]
        columns = ("PHASE", "PREDICTED S", "MEASURED S", "RATIO")
        print_table(columns, rows, numbers=columns[1:])
        kept = ", ".join(f"{name} {value:.3g}" for name, value in asdict(self.refitted).items())
        say(f"efficiencies that give these times: {kept}")


Devices = tuple[int | None, str | None, float | None]
"""(nodes, GPUs of each, GiB of each); unset: those of the run"""


def compare(
    run_dir: Path,
    *,
    fleet_from: Devices = (None, None, None),
    model_config: Mapping[str, Any] | None = None,
    lengths: Lengths = EXPECTED,
) -> Comparison:
    """A run in a directory.

    Args:
        run_dir: Its directory.
        fleet_from: Its devices, where this machine does not know them.
        model_config: The ``config.json`` of its model, where that is not on this machine.
        lengths: Of its sequences, where it did not measure them.

    Raises:
        UsageError: It is no run, has no timings yet, or its model's sizes are not known here.
    """
    from nemorl_cli.report.run_data import RunData

    if not (run_dir / "config.yaml").is_file():
        raise UsageError(f"{run_dir} is not a run directory (no config.yaml)", fix="give the path of a run")
    return compared(RunData.load(run_dir), fleet_from=fleet_from, model_config=model_config, lengths=lengths)


def compared(
    run: RunData,
    *,
    fleet_from: Devices = (None, None, None),
    model_config: Mapping[str, Any] | None = None,
    lengths: Lengths = EXPECTED,
) -> Comparison:
    """The records of a run beside its plan; the arguments are those of :func:`compare`."""
    from nemorl.config.load import load_config

    values = {name: run.metrics.get(f"timing/train/{name}", {}) for name in (*TIMINGS, "total_step_time")}
    values["generation"] = values["generation"] or run.metrics.get(BUSY, {})
    measured = {name: _median(by_step) for name, by_step in values.items() if by_step}
    if "policy_training" not in measured:
        raise UsageError(f"run {run.name} has no timings yet", fix="let it make a step first")
    config = load_config(run.config, as_overrides(asked_for(*fleet_from[:2])), for_cluster=True)
    fleet, sizes = fleet_of(config.cluster, *fleet_from), Sizes(model_config)
    found = lengths.or_else(_lengths(run, scene_of(config, fleet, sizes).work))
    scene = scene_of(config, fleet, sizes, found)
    predicted = by_timing(judged(scene, present(scene)).time)
    return Comparison(predicted, measured, _refitted(scene, predicted, measured), found, fleet)


def by_timing(time: StepTime) -> dict[str, float]:
    """Predicted seconds under the names of a run's timings."""
    seconds = {phase.name: phase.seconds for phase in time.phases}
    found = {name: sum(seconds.get(phase, 0.0) for phase in phases) for name, phases in TIMINGS.items()}
    return {**found, "total_step_time": time.seconds}


def _median(by_step: Mapping[int, float]) -> float:
    values = list(by_step.values())  # steps ascend
    return median(values[FIRST_STEPS:] or values)


def _lengths(run: RunData, expected: Work) -> Lengths:
    """Of the responses that were sampled, and of the tokens of a step.

    Args:
        run: Its records.
        expected: Of the run's config: how many sequences a step has, and the share of prompts in data without one.
    """
    mean = run.last("train/mean_gen_tokens_per_sample")
    tokens, sequences = run.last("train/total_num_tokens"), run.last("train/num_valid_samples")
    if mean is None:
        if not tokens:
            return Lengths()
        whole = tokens / expected.sequences
        share = expected.prompt_tokens / expected.length
        return Lengths(whole * share, max(1.0, whole * (1 - share)))
    prompt = tokens / sequences - mean if tokens and sequences else None
    longest = run.last("train/max_gen_tokens_per_sample")
    return Lengths(max(1.0, prompt) if prompt is not None else None, max(1.0, mean), longest)


def _refitted(scene: Scene, predicted: Mapping[str, float], measured: Mapping[str, float]) -> Efficiencies:
    """Each share scaled by predicted / measured of its phase; times of starting kernels the other way."""
    now = starting_efficiencies(scene)
    ratio = {name: seconds / predicted[name] for name, seconds in measured.items() if seconds and predicted.get(name)}
    training, sampling = ratio.get("policy_training", 1.0), ratio.get("generation", 1.0)
    scoring, sync = ratio.get("policy_and_reference_logprobs", training), ratio.get("weight_sync", 1.0)
    return Efficiencies(
        training=now.training / training,
        scoring=now.scoring / scoring,
        prefill=now.prefill / sampling,
        decode=now.decode / sampling,
        links=now.links / sync,
        decode_layer_s=now.decode_layer_s * sampling,
        decode_step_s=now.decode_step_s * sampling,
        microbatch_s=now.microbatch_s * training,
        decode_row_s=now.decode_row_s * sampling,
        mixture_s=now.mixture_s * training,
    )
