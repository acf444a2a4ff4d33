"""A loss, proven clause by clause, on batches that are drawn for it.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nemorl.contracts import SelectiveLoss
from nemorl.errors import NemorlError
from nemorl_tensors import TokenBatch

from nemorl_testing.losses import clauses
from nemorl_testing.losses.bandit_states import BanditState, bandit_states
from nemorl_testing.losses.cases import Case
from nemorl_testing.losses.drawing import OF_ROWS, OF_TOKENS, Shape, draw_cases
from nemorl_testing.losses.printing import construction, test_source
from nemorl_testing.losses.shrinking import shrink
from nemorl_testing.losses.slopes import gradient_is_that_of_the_value

CASES = 12
"""Batches that each clause is tried on."""
OF_EACH_BATCH: Sequence[Callable[..., None]] = (
    clauses.it_computes,
    clauses.nothing_to_train_costs_nothing,
    clauses.microbatches_add_up,
    clauses.packed_rows_add_up,
    clauses.order_changes_nothing,
    clauses.padding_changes_nothing,
    clauses.shards_add_up,
    clauses.shared_prefixes_change_nothing,
    clauses.calls_leave_nothing_behind,
    clauses.loss_weights_weigh,
    clauses.metrics_add_up,
    gradient_is_that_of_the_value,
)
"""Clauses that have to hold of every batch."""


@dataclass(frozen=True)
class Outcome:
    """What became of one clause."""

    name: str
    clause: str
    """What it promises, in a sentence"""
    seconds: float
    failure: str = ""
    """What was seen of the counterexample; empty where the clause holds."""
    test: str = ""
    """The counterexample as a Python test."""
    skipped: str = ""
    """Why it says nothing about this loss."""

    @property
    def state(self) -> str:
        return "broken" if self.failure else "skipped" if self.skipped else "holds"


@dataclass(frozen=True)
class LossCertificate:
    """The outcome of every clause.

    Example:
        >>> from nemorl_testing.batches import WeightedNLL
        >>> certify_loss(WeightedNLL()).is_sound
        True
    """

    loss: str
    outcomes: tuple[Outcome, ...]

    @property
    def broken(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.failure)

    @property
    def is_sound(self) -> bool:
        return not self.broken

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        found = [
            {
                "name": outcome.name,
                "clause": outcome.clause,
                "state": outcome.state,
                "seconds": round(outcome.seconds, 3),
                "seen": outcome.failure or outcome.skipped,
                "test": outcome.test,
            }
            for outcome in self.outcomes
        ]
        return {"loss": self.loss, "is_sound": self.is_sound, "seconds": round(self.seconds, 3), "clauses": found}

    def __str__(self) -> str:
        kept = sum(outcome.state == "holds" for outcome in self.outcomes)
        lines = [f"{self.loss}: {kept} clauses hold, {len(self.broken)} are broken ({self.seconds:.1f} s)"]
        for outcome in self.outcomes:
            if outcome.failure:
                lines.append(f"  broken   {outcome.name}: {outcome.clause}\n           {outcome.failure}")
            elif outcome.skipped:
                lines.append(f"  skipped  {outcome.name}: {outcome.skipped}")
        for outcome in self.broken[:1]:
            lines.append(f"\nThe simplest counterexample of {outcome.name}, as a test:\n\n{outcome.test}")
        return "\n".join(lines)


@dataclass
class _Trial:
    """One clause on one loss: arguments of a call, from the simplest on."""

    clause: Callable[..., None]
    loss: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def failure(self, *arguments: Any) -> str:
        """What the clause says of a call; empty where it holds."""
        try:
            self.clause(self.loss, *arguments, **self.options)
        except AssertionError as error:
            return str(error) or "an assertion of the loss failed"
        except Exception as error:
            return f"{type(error).__name__}: {error.message if isinstance(error, NemorlError) else error}"
        return ""

    def of_case(self, case: Case) -> str:
        return self.failure(case.outputs, case.batch)

    def test(self, *arguments: Any) -> str:
        names = list(inspect.signature(self.clause).parameters)[1:]
        return test_source(self.clause, self.loss, dict(zip(names, arguments, strict=False)), self.options)

    def counterexample(self, cases: Sequence[Case], *, in_all: bool) -> tuple[str, str]:
        """What is seen of the simplest case that fails, and its test. Both are empty where one holds, or all do."""
        failing = all(map(self.of_case, cases)) if in_all else True
        first = next(filter(self.of_case, cases), None) if failing else None
        if first is None:
            return "", ""
        case = shrink(first, lambda simpler: bool(self.of_case(simpler)))
        return self.of_case(case), self.test(case.outputs, case.batch)


def certify_loss(
    loss: Any,
    *,
    group: int | None = None,
    is_value: bool = False,
    example: TokenBatch | None = None,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> LossCertificate:
    """Try every clause on a loss, a few seconds in all, and shrink what breaks one.

    Args:
        loss: Any ``nemorl.contracts.Loss``.
        group: Rows that it compares with each other, 2 for pairs. Unset: the example's, or by the fields that it reads.
        is_value: The model says values, as critics and reward models do.
        example: A batch that the loss is given in a run. Fields whose names say nothing are drawn from it.
        told: Called with each outcome as soon as it is known.

    Raises:
        UsageError: It reads a field of which nothing is known.

    Example:
        >>> from nemorl_testing.batches import Selective
        >>> [outcome.name for outcome in certify_loss(Selective()).broken]
        []
    """
    shape = Shape.of(loss, group=group, is_value=is_value, example=example)
    cases = list(draw_cases(shape, CASES))
    outcomes: list[Outcome] = []
    for outcome in _outcomes(loss, shape, cases):
        outcomes.append(outcome)
        told(outcome)
        if outcome.name == clauses.it_computes.__name__ and outcome.failure:
            break
    return LossCertificate(construction(loss)[1], tuple(outcomes))


def _outcomes(loss: Any, shape: Shape, cases: list[Case]) -> Iterator[Outcome]:
    for clause in OF_EACH_BATCH:
        yield _tried(clause, [_Trial(clause, loss)], cases, in_all=False)
    extremes = [_extreme(case) for case in cases]
    yield _tried(clauses.stays_finite, [_Trial(clauses.stays_finite, loss)], extremes, in_all=False)
    if isinstance(loss, SelectiveLoss):
        told = clauses.has_gradient_is_true
        yield _tried(told, [_Trial(told, loss)], cases, in_all=False)
    # What has to hold of some batch at least: a loss may leave out tokens that its bounds, its signs say nothing of.
    yield from _of_some_batch(loss, shape, cases)
    yield from _on_the_bandit(loss, shape)


def _extreme(case: Case) -> Case:
    """The same case in which the model finds some trained tokens all but impossible."""
    rows = []
    for index, row in enumerate(case.rows):
        pairs = zip(row.mask, row.outputs, strict=True)
        far = tuple(
            -100.0 - i if keep and not isinstance(said, tuple) and (i + index) % 2 else said
            for i, (keep, said) in enumerate(pairs)
        )
        rows.append(replace(row, outputs=far))
    return replace(case, rows=tuple(rows))


def _tried(clause: Callable[..., None], trials: Sequence[_Trial], cases: Sequence[Case], *, in_all: bool) -> Outcome:
    began, seen, test = time.perf_counter(), "", ""
    for trial in trials:
        seen, test = trial.counterexample(cases, in_all=in_all)
        if seen:
            break
    return _outcome(clause, began, failure=seen, test=test)


def _outcome(clause: Callable[..., None], began: float, **found: str) -> Outcome:
    text = " ".join((inspect.getdoc(clause) or "").split("\n\n")[0].split())
    return Outcome(clause.__name__, text, time.perf_counter() - began, **found)


def _of_some_batch(loss: Any, shape: Shape, cases: list[Case]) -> Iterator[Outcome]:
    for clause in (clauses.first_tokens_teach, clauses.last_tokens_teach):
        yield _tried(clause, [_Trial(clause, loss)], cases, in_all=True)
    places = clauses.every_place_of_a_group_teaches
    yield _tried(places, [_Trial(places, loss, {"place": i}) for i in range(shape.group)], cases, in_all=True)
    ids = clauses.every_token_id_teaches
    began, seen, test = time.perf_counter(), "", ""
    for token in range(4):
        having = [case for case in cases if bool(((case.batch.token_ids == token) & case.batch.mask).any())]
        if having and not seen:
            seen, test = _Trial(ids, loss, {"token": token}).counterexample(having, in_all=True)
    yield _outcome(ids, began, failure=seen, test=test)
    matter = clauses.declared_fields_matter
    trials = [
        _Trial(matter, loss, {"field": name, "is_metric_enough": _may_be_metric(name)})
        for name in sorted(shape.requires)
        if cases[0].batch[name].is_floating_point() or cases[0].batch[name].dtype == torch.bool
    ]
    yield _tried(matter, trials, cases, in_all=True)


def _may_be_metric(name: str) -> bool:
    # The sampler's disagreement with the old policy is told by losses that have no other use for the two.
    return name in ("generation_logprobs", "old_logprobs") or name not in OF_TOKENS.keys() | OF_ROWS.keys()


def _on_the_bandit(loss: Any, shape: Shape) -> Iterator[Outcome]:
    for clause, group in itertools.groupby(bandit_states(loss, shape), lambda state: state.clause):
        states: list[BanditState] = list(group)
        trial, began = _Trial(clause, loss), time.perf_counter()
        if states[0].why_not:
            yield _outcome(clause, began, skipped=states[0].why_not)
            continue
        seen, test = "", ""
        for state in states:
            seen = seen or trial.failure(*state.arguments)
            test = test or (trial.test(*state.arguments) if seen else "")
        yield _outcome(clause, began, failure=seen, test=test)
