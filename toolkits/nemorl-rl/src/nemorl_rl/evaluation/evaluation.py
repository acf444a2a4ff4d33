"""Evaluation: what a model's responses to held-out prompts are worth. Validation and ``nemorl eval`` are this one path.

``evaluate`` asks, scores and averages; ``Evaluator`` loads a model and an environment for it, outside any run. What
k of n responses are worth is in ``voting``; the command and its tables are in ``nemorl_cli.evals``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Self

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, UsageError
from nemorl.metrics import Mean
from nemorl.types import Prompt, Row, Sample, Samples, SamplingParams

from nemorl_rl.config import RolloutRunConfig, RolloutValidationConfig
from nemorl_rl.data.mixtures import RowSets
from nemorl_rl.data.row_sizes import require_size
from nemorl_rl.data.rows import held_out_rows_of, rows_of
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.data.validation_sets import FAILED
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.environments.sources import as_environment
from nemorl_rl.evaluation.voting import cons_at_k, pass_at_k
from nemorl_rl.models.hub_models import require_models
from nemorl_rl.placement.engines import standalone_generation
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan, accuracy_of
from nemorl_rl.rollouts.outcomes import outcome_of
from nemorl_rl.rollouts.prompts import to_prompts
from nemorl_rl.rollouts.seeding import derive_seed


@dataclass(frozen=True)
class Evaluation:
    """Numbers and the samples behind them."""

    metrics: dict[str, float]
    samples: Samples
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    """Standard error of each metric's mean over seeds; empty for one seed."""


def evaluate(
    rollouts: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    num_generations: int,
    sampling: SamplingParams,
    seed: int,
    max_turns: int = 1,
    batch_size: int | None = None,
    on_group: Callable[[Sequence[Sample]], None] = lambda _: None,
) -> Evaluation:
    """Respond to every prompt and average.

    Args:
        rollouts: What responds and scores.
        prompts: P tasks, numbered by ``index``.
        num_generations: Responses per prompt.
        sampling: How they are drawn.
        seed: Seeds every response, each differently.
        max_turns: Responses per episode at most, in environments of several turns.
        batch_size: Prompts handed to the generator at a time. Unset: all.
        on_group: Told the responses to each prompt as soon as they are scored.
    """
    groups: dict[int, Sequence[Sample]] = {}
    size = batch_size or max(1, len(prompts))
    plan = RolloutPlan(num_generations, sampling, max_turns, is_trained=False)
    for start in range(0, len(prompts), size):
        for group in rollouts.stream(prompts[start : start + size], plan, seed=seed):
            groups[group[0].prompt.index] = group
            on_group(group)
    ordered = [groups[prompt.index] for prompt in prompts]
    return Evaluation(measure(ordered), Samples([sample for group in ordered for sample in group]))


def measure(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """The metrics of scored responses, one group per prompt, all of one size G: means over the prompts.

    Returns:
        ``accuracy`` (mean correctness, or mean reward where nothing says right or wrong), ``reward``, ``avg_length``
        (response tokens), ``truncation_rate``; ``avg_turns`` where any episode had several; with G above 1 ``pass@k``,
        and ``cons@k`` where the environment tells answers apart (``Score.answer``), for k = 1 … G. Responses without a
        verdict are left out of all of these and told as ``failed_frac``, where there are any; without any verdict that
        is all.
    """
    means = {name: Mean.of(values).value for name, values in values_by_prompt(groups).items()}
    verdicts = [sample.score.valid for group in groups for sample in group]
    if all(verdicts):
        return means
    failed = {FAILED: verdicts.count(False) / len(verdicts)}
    return {**means, **failed} if any(verdicts) else failed


def values_by_prompt(groups: Sequence[Sequence[Sample]]) -> dict[str, list[float]]:
    """Each metric of :func:`measure`: its value for every prompt that has a verdict, in order; ``pass@k`` and
    ``cons@k`` for those that have k. So fewer prompts widen the interval."""
    size = len(groups[0]) if groups else 0
    groups = [judged for group in groups if (judged := [sample for sample in group if sample.score.valid])]
    samples = [sample for group in groups for sample in group]
    values = {
        "accuracy": [_mean(map(accuracy_of, group)) for group in groups],
        "reward": [_mean(sample.reward for sample in group) for group in groups],
        "avg_length": [_mean(sample.response_tokens for sample in group) for group in groups],
        "truncation_rate": [_mean(sample.truncated for sample in group) for group in groups],
    }
    if any(sample.turns > 1 for sample in samples):
        values["avg_turns"] = [_mean(sample.turns for sample in group) for group in groups]
    if size > 1:
        correct = [[accuracy_of(sample) > 0.5 for sample in group] for group in groups]
        for k in range(1, size + 1):
            values[f"pass@{k}"] = [pass_at_k(len(right), sum(right), k) for right in correct if len(right) >= k]
        if any(sample.score.answer is not None for sample in samples):
            answers = [[sample.score.answer for sample in group] for group in groups]
            by_prompt = [cons_at_k(given, right) for given, right in zip(answers, correct, strict=True)]
            for k in range(1, size + 1):
                values[f"cons@{k}"] = [of_k[k - 1] for of_k in by_prompt if len(of_k) >= k]
    return values


def errors_over_prompts(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Standard error of each metric of :func:`measure`, the prompts being a sample of all that could be asked.

    sqrt(sum_i (v_i - mean(v))^2 / (n - 1)) / sqrt(n) over the values v_i of n prompts (arXiv:2411.00640, section 2: the
    responses to one prompt are averaged first, since they are not independent). Empty for one prompt.
    """
    return {
        name: statistics.stdev(values) / math.sqrt(len(values))
        for name, values in values_by_prompt(groups).items()
        if len(values) > 1
    }


def _mean(values: Iterable[float]) -> float:
    return Mean.of(values).value


class Evaluator:
    """A model and an environment, loaded once, to be asked about any number of datasets.

    Example:
        >>> with Evaluator(config) as evaluator:  # doctest: +SKIP
        ...     print(evaluator.evaluate(rows, seeds=3).metrics["accuracy"])
    """

    def __init__(
        self, config: RolloutRunConfig, *, max_turns: int | None = None, environment: Environment | None = None
    ) -> None:
        """
        Args:
            config: Model, generation, environment and ``validation`` (samples, generations, temperature).
            max_turns: Responses per episode at most. Unset: what the config's algorithm trains with.
            environment: Scores responses, and is closed with this. Unset: the config's.

        Raises:
            UsageError: the config has no environment.
        """
        self._config = config
        self._max_turns = max_turns or configured_turns(config)
        environment = environment if environment is not None else as_environment(config.environment)
        if environment is None:
            raise UsageError("nothing scores the responses", fix="set `environment:`, e.g. environment=math")
        self._pool = EnvironmentPool.from_config(environment, config.rollouts)
        try:
            require_models(config)
            self._tokenizer = Tokenizer.of(config.policy)
            self._engine = standalone_generation(config.generation, config.policy)
        except BaseException:
            self._pool.close()
            raise

    def evaluate(
        self,
        rows: Sequence[Row],
        *,
        seeds: int = 1,
        batch_size: int | None = None,
        on_group: Callable[[int, Sequence[Sample]], None] = lambda _seed, _group: None,
        settings: RolloutValidationConfig | None = None,
        environment: Environment | None = None,
    ) -> Evaluation:
        """Respond to the first ``validation.max_samples`` rows, once per seed.

        Args:
            rows: The tasks.
            seeds: Repetitions that differ in the seed only; the first is the validation of a run of this config.
            batch_size: Prompts handed to the generator at a time. Unset: all.
            on_group: Told (number of the seed, responses to one prompt) as soon as they are scored.
            settings: In place of the config's ``validation``.
            environment: Scores these responses in place of the evaluator's own, and is closed afterwards.

        Returns:
            Means over the seeds, their standard errors (sample standard deviation / sqrt(seeds)), all samples.
        """
        settings = settings or self._config.validation
        if seeds > 1 and settings.temperature == 0:
            raise UsageError("greedy responses are the same for every seed", fix="set a temperature above 0")
        asked = [rows[i] for i in range(min(len(rows), settings.max_samples))]
        for number, row in enumerate(asked):
            require_size(row, f"row {number}", self._config.policy.max_sequence_tokens)
        prompts = to_prompts(asked, self._tokenizer)
        if environment is None:
            return self._responses(prompts, settings, self._pool, seeds, batch_size, on_group)
        with closing(EnvironmentPool.from_config(environment, self._config.rollouts)) as pool:
            return self._responses(prompts, settings, pool, seeds, batch_size, on_group)

    def _responses(
        self,
        prompts: Sequence[Prompt],
        settings: RolloutValidationConfig,
        pool: EnvironmentPool,
        seeds: int,
        batch_size: int | None,
        on_group: Callable[[int, Sequence[Sample]], None],
    ) -> Evaluation:
        limit = self._config.policy.max_sequence_tokens
        rollouts = RolloutEngine(self._engine, pool, self._tokenizer, max_sequence_tokens=limit)
        parts = [
            evaluate(
                rollouts,
                prompts,
                num_generations=settings.num_generations,
                sampling=settings.sampling(self._config.generation),
                seed=derive_seed(self._config.seed, "validation", *([number] if number else [])),
                max_turns=self._max_turns,
                batch_size=batch_size,
                on_group=lambda group, number=number: on_group(number, group),  # type: ignore[misc]
            )
            for number in range(seeds)
        ]
        return _combined(parts)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens of the model."""
        return self._tokenizer.decode(token_ids)

    def close(self) -> None:
        """Release the model and the environment."""
        try:
            self._pool.close()
        finally:
            self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def held_out_rows(config: RolloutRunConfig) -> Sequence[Row]:
    """The rows that a run of this config validates on, of all its validation sets.

    Raises:
        DataError: it has none.
    """
    chosen = config.validation.data
    if chosen is not None:
        rows = held_out_rows_of(chosen)
    else:
        rows = rows_of(config.data, "validation") if config.data is not None else None
    if not rows:
        raise DataError("the dataset has no validation rows", fix="set validation.data, or a validation split in data")
    return rows


def held_out_sets(config: RolloutRunConfig) -> Mapping[str, Sequence[Row]]:
    """The validation sets of a run of this config by name; one alone is called ``validation``."""
    rows = held_out_rows(config)
    return rows.sets if isinstance(rows, RowSets) else {"validation": rows}


def configured_turns(config: RolloutRunConfig) -> int:
    """Responses per episode that the config's algorithm trains with; 1 for a config of none."""
    if not config.trainer:
        return 1
    return planned_turns(config.build())


def planned_turns(trainer: Any) -> int:
    """``max_turns`` of a trainer's rollout plan; 1 for an algorithm that has no plan."""
    try:
        turns: int = trainer.rollout_plan.max_turns
    except NotImplementedError:
        return 1
    return turns


def _combined(parts: Sequence[Evaluation]) -> Evaluation:
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    values = {name: [part.metrics[name] for part in parts if name in part.metrics] for name in names}
    if "failed_frac" in values:  # of a seed that does not tell it there is none
        values["failed_frac"] = [part.metrics.get("failed_frac", 0.0) for part in parts]
    return Evaluation(
        {name: statistics.fmean(of_seeds) for name, of_seeds in values.items()},
        Samples([sample for part in parts for sample in part.samples]),
        {
            name: statistics.stdev(of_seeds) / math.sqrt(len(of_seeds))
            for name, of_seeds in values.items()
            if len(of_seeds) > 1
        },
    )


def eval_record(sample: Sample, dataset: str, seed: int) -> dict[str, Any]:
    """A sample as one line of the output of ``nemorl eval``: everything needed to count again."""
    return {
        "dataset": dataset,
        "seed": seed,
        "index": sample.prompt.index,
        "prompt": sample.prompt.text,
        "response": sample.response,
        "answer": sample.prompt.answer,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "tokens": sample.response_tokens,
        "given": sample.score.answer,
        "correct": sample.score.correct,
        "outcome": outcome_of(sample),
        "turns": sample.turns,
        "metrics": dict(sample.score.metrics),
    }
