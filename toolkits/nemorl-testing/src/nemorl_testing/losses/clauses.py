"""What a loss promises, one function for each clause. A clause raises AssertionError where it does not hold.

# N = tokens of all sequences concatenated, B = sequences

The source of a clause and of the helpers that it calls is printed as the test of a counterexample, so nothing here
uses more than torch, the kernel's metrics and ``TokenBatch``. The first line of a docstring states the clause.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from nemorl.metrics import Metric, merge, values
from nemorl_tensors import TokenBatch
from torch import Tensor


def value_and_gradient(loss: Any, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The loss and its derivative by every output, zeros where there is none."""
    leaf = outputs.detach().clone().requires_grad_()
    value = loss(leaf.clone(), batch)[0]
    if not value.requires_grad:
        return value.detach(), torch.zeros_like(outputs)
    (gradient,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(outputs) if gradient is None else gradient


def tokens_of(batch: TokenBatch, sequences: Sequence[int]) -> Tensor:
    """Where the tokens of some sequences stand in [N], one sequence after the other."""
    places = torch.split(torch.arange(batch.num_tokens), batch.lengths.tolist())
    return torch.cat([places[index] for index in sequences])


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=False)


def adds_up(loss: Any, outputs: Tensor, batch: TokenBatch, parts: Sequence[Sequence[int]], what: str) -> None:
    """Values and gradients of parts are together those of the whole batch."""
    value, gradient = value_and_gradient(loss, outputs, batch)
    total, together = torch.zeros_like(value), torch.zeros_like(gradient)
    for part in parts:
        places = tokens_of(batch, part)
        share, slope = value_and_gradient(loss, outputs[places], batch.select(part))
        total = total + share
        together[places] = slope
    assert same(total, value), f"the loss is {float(value):.6g} of the whole batch, {float(total):.6g} {what}"
    assert same(together, gradient), f"{what}, the gradient is {together.tolist()}, whole {gradient.tolist()}"


def it_computes(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """Any batch gives one finite number with a finite gradient, and metrics that say how they add up."""
    leaf = outputs.detach().clone().requires_grad_()
    value, metrics = loss(leaf.clone(), batch)
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    assert is_scalar, f"it returned {value!r:.80}, not a scalar tensor"
    assert all(isinstance(metric, Metric) for metric in metrics.values()), f"not all are metrics: {metrics!r:.200}"
    assert math.isfinite(float(value.detach())), f"the loss is {float(value.detach())}"
    assert value.requires_grad, "its value has no gradient: it is detached, or made of numbers that were"
    value.sum().backward()  # type: ignore[no-untyped-call]
    is_finite = leaf.grad is not None and bool(leaf.grad.isfinite().all())
    assert is_finite, f"the gradient is {leaf.grad}"


def nothing_to_train_costs_nothing(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """A microbatch with no trained token has loss 0, and no gradient."""
    nothing = replace(batch, mask=torch.zeros_like(batch.mask), loss_weights=torch.zeros_like(batch.loss_weights))
    value, gradient = value_and_gradient(loss, outputs, nothing)
    assert float(value) == 0.0, f"the loss is {float(value)}"
    assert not gradient.any(), f"the gradient is {gradient.tolist()}"


def microbatches_add_up(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """However a batch is cut into microbatches, losses and gradients add up: nothing is divided by what is in one."""
    size = batch.sequences_per_group
    ends = list(range(0, len(batch) + 1, size))
    adds_up(loss, outputs, batch, [range(end - size, end) for end in ends[1:]], "in microbatches of one row each")
    for middle in ends[1:-1]:
        parts = [range(middle), range(middle, len(batch))]
        adds_up(loss, outputs, batch, parts, f"cut after {middle} rows")


def packed_rows_add_up(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """Packed into bins of a budget of tokens, longest first, rows give the loss and gradient of the whole batch."""
    size = batch.sequences_per_group
    lengths = batch.lengths.view(-1, size).sum(1)
    budget, bins, loads = max(int(lengths.max()), int(lengths.sum()) // 2), list[list[int]](), list[int]()
    for group in torch.argsort(lengths, descending=True, stable=True).tolist():
        fits = [index for index, load in enumerate(loads) if load + int(lengths[group]) <= budget]
        if not fits:
            bins.append([])
            loads.append(0)
        place = fits[0] if fits else len(bins) - 1
        bins[place] += range(group * size, (group + 1) * size)
        loads[place] += int(lengths[group])
    adds_up(loss, outputs, batch, bins, f"packed as rows {bins}")


def order_changes_nothing(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """In any order of the rows, or of the groups of rows that are compared, loss and gradient are the same."""
    size = batch.sequences_per_group
    starts = list(range(0, len(batch), size))
    for order in (starts[::-1], starts[1:] + starts[:1]):
        rows = [start + member for start in order for member in range(size)]
        adds_up(loss, outputs, batch, [rows], f"with rows in the order {rows}")


def padding_changes_nothing(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """Masked tokens around a row, with NaN in all that is masked, reach neither loss nor gradient."""
    rows = torch.split(torch.arange(batch.num_tokens), batch.lengths.tolist())
    source = torch.cat([torch.cat([row[:1], row, row[-1:], row[-1:]]) for row in rows])
    is_real = torch.cat([torch.tensor([False, *[True] * len(row), False, False]) for row in rows])
    mask = batch.mask[source] & is_real

    def spread(values: Tensor) -> Tensor:
        """[N] or [N, K] in the longer rows."""
        taken = values[source]
        is_kept = mask.reshape(-1, *[1] * (taken.ndim - 1))
        return torch.where(is_kept, taken, math.nan) if taken.is_floating_point() else taken

    longer = replace(
        batch,
        token_ids=torch.where(is_real, batch.token_ids[source], 0),
        lengths=batch.lengths + 3,
        mask=mask,
        loss_weights=torch.where(mask, batch.loss_weights[source], 0.0),
        token_fields={name: spread(field) for name, field in batch.token_fields.items()},
    )
    value, gradient = value_and_gradient(loss, outputs, batch)
    padded, slope = value_and_gradient(loss, spread(outputs), longer)
    assert same(padded, value), f"the loss is {float(value):.6g}, with padding {float(padded):.6g}"
    assert not slope[~mask].any(), f"masked tokens have the gradient {slope[~mask].tolist()}"
    assert same(slope[is_real], gradient), f"the gradient is {gradient.tolist()}, padded {slope[is_real].tolist()}"


def shards_add_up(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """On data-parallel ranks, each with its copy of the loss and its share of the rows, losses and gradients add up."""
    value, gradient = value_and_gradient(loss, outputs, batch)
    for ranks in (2, 3):
        total, together = torch.zeros_like(value), torch.zeros_like(gradient)
        for shard in filter(None, batch.shards(ranks)):
            places = tokens_of(batch, shard)
            copied, sent = pickle.loads(pickle.dumps((loss, batch.select(shard))))
            share, together[places] = value_and_gradient(copied, outputs[places], sent)
            total = total + share
        assert same(total, value), f"the loss is {float(value):.6g} on one rank, {float(total):.6g} on {ranks}"
        assert same(together, gradient), (
            f"on {ranks} ranks the gradient is {together.tolist()}, not {gradient.tolist()}"
        )


def shared_prefixes_change_nothing(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """Where rows that begin alike are computed once, a shared token has the sum of the gradients of its rows."""
    nodes: dict[tuple[int, ...], int] = {}
    index, first = [], []
    for ids, places in zip(
        torch.split(batch.token_ids, batch.lengths.tolist()),
        torch.split(torch.arange(batch.num_tokens), batch.lengths.tolist()),
        strict=True,
    ):
        for length, place in enumerate(places.tolist(), start=1):
            path = tuple(ids[:length].tolist())
            if path not in nodes:
                nodes[path] = len(nodes)
                first.append(place)
            index.append(nodes[path])
    shared = outputs[first].detach().clone().requires_grad_()
    apart = outputs[first][index]
    value, gradient = value_and_gradient(loss, apart, batch)
    summed = torch.zeros_like(shared).index_add_(0, torch.tensor(index), gradient)
    found = loss(shared[index], batch)[0]
    assert same(found.detach(), value), f"the loss is {float(value):.6g} apart and {float(found.detach()):.6g} shared"
    (slope,) = torch.autograd.grad(found.sum(), shared, allow_unused=True) if found.requires_grad else (None,)
    slope = torch.zeros_like(shared) if slope is None else slope
    assert same(slope, summed), f"shared tokens have the gradient {slope.tolist()}, not {summed.tolist()}"
    shards = batch.shards(2, by_trees=True) if batch.sequences_per_group == 1 else batch.shards(2)
    adds_up(loss, apart, batch, [shard for shard in shards if shard], "with rows that begin alike on one rank")


def calls_leave_nothing_behind(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """A call changes neither outputs nor batch, and the next one gives the same, on the same or another copy."""
    given, kept = outputs.detach().clone().requires_grad_(), copy.deepcopy(batch)
    passed = given.clone()
    before = float(loss(passed, batch)[0].detach())
    assert torch.equal(passed.detach(), outputs), "it writes into the outputs that it is given"
    for name in ("token_ids", "mask", "loss_weights"):
        assert torch.equal(getattr(batch, name), getattr(kept, name)), f"it writes into batch.{name}"
    for name in (*kept.token_fields, *kept.sequence_fields):
        assert torch.equal(batch[name], kept[name]), f"it writes into the batch's {name}"
    loss(
        outputs[tokens_of(batch, range(batch.sequences_per_group))] - 0.5,
        batch.select(range(batch.sequences_per_group)),
    )
    again, other = float(loss(outputs, batch)[0]), float(pickle.loads(pickle.dumps(loss))(outputs, batch)[0])
    assert again == before, f"the first call gives {before:.6g}, a later one {again:.6g}"
    assert other == before, f"it gives {before:.6g}, its copy on another worker {other:.6g}"


def loss_weights_weigh(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """``loss_weights`` are what weighs tokens: twice the weights add once more what the weights give."""
    scaled = [value_and_gradient(loss, outputs, replace(batch, loss_weights=batch.loss_weights * k)) for k in (0, 1, 2)]
    (none, no_slope), (once, slope), (twice, double) = scaled
    is_added = same(twice - once, once - none) and same(double - slope, slope - no_slope)
    assert is_added, (
        f"with 0, 1 and 2 times the weights the loss is {float(none):.6g}, {float(once):.6g}, {float(twice):.6g}"
    )
    assert not batch.mask.any() or not slope.any() or not torch.equal(double, slope), (
        f"twice the weights change nothing: the gradient stays {slope.tolist()}"
    )


def stays_finite(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """Log-probs 100 nats apart, which no sane run has, leave the loss and its gradient finite."""
    value, gradient = value_and_gradient(loss, outputs, batch)
    assert math.isfinite(float(value)), f"the loss is {float(value)}"
    assert gradient.isfinite().all(), f"the gradient is {gradient.tolist()}"


def metrics_add_up(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """What it reports of parts is together what it reports of the whole: totals and counts, never means of means."""
    size, parts = batch.sequences_per_group, []
    for start in range(0, len(batch), size):
        part = range(start, start + size)
        parts.append(loss(outputs[tokens_of(batch, part)], batch.select(part))[1])
    whole, together = values(loss(outputs, batch)[1]), values(merge(parts))
    for name, number in whole.items():
        found = together.get(name, math.nan)
        close = math.isclose(found, number, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(found) and math.isnan(number))
        assert close, f"{name} is {number:.6g} of the whole batch, {found:.6g} of its parts together"


def has_gradient_is_true(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """A sequence of which ``has_gradient`` says False has none."""
    said = loss.has_gradient(batch)
    gradient = value_and_gradient(loss, outputs, batch)[1]
    wrong = gradient.reshape(len(gradient), -1).any(1) & ~said[batch.sequence_ids]
    assert not wrong.any(), f"has_gradient is {said.tolist()}, the gradient {gradient.tolist()}"


def first_tokens_teach(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """The first trained token of a response has a gradient."""
    gradient = value_and_gradient(loss, outputs, batch)[1].reshape(batch.num_tokens, -1).any(1)
    trained = (batch.mask & (batch.loss_weights > 0)).nonzero().flatten().tolist()
    firsts = [place for place in trained if place - 1 not in trained]
    assert not firsts or gradient[firsts].any(), f"tokens {firsts} are the first that are trained; none has a gradient"


def last_tokens_teach(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """The last trained token of a row has a gradient."""
    gradient = value_and_gradient(loss, outputs, batch)[1].reshape(batch.num_tokens, -1).any(1)
    ends = (torch.cumsum(batch.lengths, 0) - 1).tolist()
    lasts = [place for place in ends if batch.mask[place]]
    assert not lasts or gradient[lasts].any(), f"tokens {lasts} are the last of their rows; none has a gradient"


def every_place_of_a_group_teaches(loss: Any, outputs: Tensor, batch: TokenBatch, place: int) -> None:
    """Of rows that are compared, each has a gradient."""
    gradient = value_and_gradient(loss, outputs, batch)[1].reshape(batch.num_tokens, -1).any(1)
    is_there = batch.mask & (batch.sequence_ids % batch.sequences_per_group == place)
    assert not is_there.any() or gradient[is_there].any(), f"no row number {place} of its group has a gradient"


def every_token_id_teaches(loss: Any, outputs: Tensor, batch: TokenBatch, token: int) -> None:
    """A trained token has a gradient whatever its id: what is trained is said by the mask."""
    gradient = value_and_gradient(loss, outputs, batch)[1].reshape(batch.num_tokens, -1).any(1)
    is_it = batch.mask & (batch.token_ids == token)
    assert not is_it.any() or gradient[is_it].any(), f"trained tokens with the id {token} have no gradient"


def declared_fields_matter(loss: Any, outputs: Tensor, batch: TokenBatch, field: str, is_metric_enough: bool) -> None:
    """What it declares to read changes what it gives: others are computed for nothing, or read in place of it."""
    values_before, field_before = values(loss(outputs, batch)[1]), batch[field]
    shifted = ~field_before if field_before.dtype == torch.bool else 1.5 * field_before - 0.2
    change: Callable[..., TokenBatch] = batch.with_tokens if field in batch.token_fields else batch.with_sequences
    other = change(**{field: shifted})
    (value, gradient), (moved, slope) = (value_and_gradient(loss, outputs, one) for one in (batch, other))
    is_changed = not (torch.equal(value, moved) and torch.equal(gradient, slope))
    is_reported = is_metric_enough and values(loss(outputs, other)[1]) != values_before
    assert is_changed or is_reported, f"it declares {field}, and gives the same whatever is in it"
