"""The losses of the Tinker API, by hand: values, gradients, and what clients rely on.

# N = tokens of all sequences concatenated, K = target tokens at each position
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from nemorl.errors import UsageError
from nemorl.metrics import merge, values
from nemorl_agents.tinker.losses import LOSSES, ClientLoss, loss_named
from nemorl_tensors import TokenBatch
from recorded_messages import Raises
from torch import Tensor

NAN = math.nan
LOG2, LOG3 = math.log(2), math.log(3)

# Three data of 2, 1 and 3 positions. The ratios r = P / Q are 2, 1 | 1/4 | 1, 3, 1/2.
P = [1 / 2, 1 / 4, 1 / 8, 0.3, 0.6, 1 / 2]
Q = [1 / 4, 1 / 4, 1 / 2, 0.3, 0.2, 1.0]
A = [1.0, -2.0, 3.0, 0.0, -1.0, -4.0]
WEIGHTS = [1.0, -2.0, 0.5, 0.0, 3.0, -1.0]
COUNTED = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
"""``sequence_ratio_mask``: log ratios that count are log 2, 0 | -2 log 2 | log 3, -log 2."""
LENGTHS = [3, 2, 4]
FIRST = [0, 3, 5]


def laid_out(numbers: list[float]) -> Tensor:
    """[9] float64 of one number for each position, NaN at the first token of each datum."""
    rest = iter(numbers)
    return torch.tensor([NAN if t in FIRST else next(rest) for t in range(sum(LENGTHS))], dtype=torch.float64)


def batch_of(**fields: list[float]) -> TokenBatch:
    known = {"logprobs": [math.log(q) for q in Q], "advantages": A, "weights": WEIGHTS, "sequence_ratio_mask": COUNTED}
    shape = TokenBatch.from_sequences([[1] * n for n in LENGTHS], [[True] * n for n in LENGTHS])
    laid = {name: laid_out(numbers) for name, numbers in {**known, **fields}.items()}
    return replace(shape, loss_weights=shape.mask.float()).with_tokens(**laid)


def with_defaults(batch: TokenBatch, loss: ClientLoss) -> TokenBatch:
    """The bounds of the loss at every position, where there are no others."""
    missing = {name: number.default for name, number in loss.inputs.items() if name not in batch}
    return batch.with_tokens(**{name: laid_out([value or 0.0] * 6) for name, value in missing.items()})


def evaluated(loss: ClientLoss, batch: TokenBatch) -> tuple[float, list[float], dict[str, float]]:
    """Value, gradient by the log-prob of each position, and metrics."""
    logprobs = laid_out([math.log(p) for p in P]).requires_grad_()
    value, metrics = loss(logprobs, with_defaults(batch, loss))
    value.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad[FIRST].tolist() == [0.0, 0.0, 0.0]
    return value.item(), logprobs.grad[batch.mask].tolist(), values(metrics)


def close(numbers: object) -> object:
    return pytest.approx(numbers, rel=1e-6, abs=1e-9)


# -sum w p = log 2 - 4 log 2 + 1.5 log 2 - 3 log 0.6 - log 2 = -2.5 log 2 - 3 log 0.6; its gradient is -w.
# -sum r A = -(2 - 2 + 0.75 + 0 - 3 - 2) = 4.25; its gradient is -r A.
# ppo: min(2, 1.2), min(-2, -2), min(0.75, 2.4), 0, min(-3, -1.2), min(-2, -3.2); where the clip decides, no gradient.
# cispo: no ratio is above 4. r p A = -2 log 2 + 4 log 2 - 2.25 log 2 + 0 - 3 log 0.6 + 2 log 2.
# dro: (p - q)^2 = (1 + 0 + 4 + 0 + 1) log^2 2 + log^2 3; p A = (-1 + 4 - 9 + 4) log 2 - log 0.6.
# gspo: the sequences' ratios are sqrt(2 * 1), 1/4 and sqrt(3 / 2), the first token alone is clipped, at 1.0004.
HAND = {
    "cross_entropy": (-2.5 * LOG2 - 3 * math.log(0.6), [-weight for weight in WEIGHTS]),
    "importance_sampling": (4.25, [-2.0, 2.0, -0.75, 0.0, 3.0, 2.0]),
    "ppo": (-(1.2 - 2 + 0.75 + 0 - 3 - 3.2), [0.0, 2.0, -0.75, 0.0, 3.0, 0.0]),
    "cispo": (-(1.75 * LOG2 - 3 * math.log(0.6)), [-2.0, 2.0, -0.75, 0.0, 3.0, 2.0]),
    "dro": (
        0.025 * (6 * LOG2**2 + LOG3**2) - (-2 * LOG2 - math.log(0.6)),
        [
            0.05 * log_ratio - a
            for log_ratio, a in zip([LOG2, 0.0, -2 * LOG2, 0.0, LOG3, -LOG2], A, strict=True)
        ],
    ),
    "gspo": (
        -(1.0004 - 2 * math.sqrt(2) + 0.75 + 0 - math.sqrt(1.5) - 4 * math.sqrt(1.5)),
        [0.0, 2 * math.sqrt(2), -0.75, 0.0, math.sqrt(1.5), 4 * math.sqrt(1.5)],
    ),
}  # fmt: skip


def test_every_loss_has_a_number_worked_by_hand() -> None:
    assert HAND.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_by_hand(name: str) -> None:
    value, gradient, metrics = evaluated(loss_named(name), batch_of())
    expected, slopes = HAND[name]
    assert value == close(expected)
    assert gradient == close(slopes)
    assert metrics["loss:sum"] == close(expected)


def test_metrics_are_sums_over_tokens_that_train() -> None:
    _, _, metrics = evaluated(loss_named("cross_entropy"), batch_of())
    assert metrics == close({"loss:sum": HAND["cross_entropy"][0], "weights:sum": 1.5, "tokens:sum": 5.0})
    # Without the third advantage, which ppo's sum above has with 0.75, ratios 2, 1, 3 and 1/2 count: all but the 1 are
    # clipped.
    _, _, metrics = evaluated(loss_named("ppo"), batch_of(advantages=[1.0, -2.0, 0.0, 0.0, -1.0, -4.0]))
    sums = {"tokens:sum": 4.0, "ratio:sum": 6.5, "log_ratio:sum": LOG3, "clipped_tokens:sum": 3.0}
    assert metrics == close({"loss:sum": 7.0, **sums})
    _, _, metrics = evaluated(loss_named("dro", {"beta": 2.0}), batch_of())
    assert metrics["penalty:sum"] == close(6 * LOG2**2 + LOG3**2)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_add_up_to_the_whole(name: str) -> None:
    loss = loss_named(name)
    batch = with_defaults(batch_of(), loss)
    logprobs = laid_out([math.log(p) for p in P])
    whole, metrics = loss(logprobs, batch)
    order = [2, 0, 1]
    parts = [loss(batch.with_tokens(outputs=logprobs).select([i])["outputs"], batch.select([i])) for i in order]
    assert float(sum(value for value, _ in parts)) == close(float(whole))
    assert values(merge([part for _, part in parts])) == close(values(metrics))
    assert all(len(name.split(":")) == 2 for name in metrics)


@pytest.mark.parametrize("name", LOSSES)
def test_targets_that_a_batch_names_have_the_same_loss(name: str) -> None:
    loss = loss_named(name)
    batch = with_defaults(batch_of(), loss)
    logprobs = laid_out([math.log(p) for p in P])
    named = batch.with_tokens(candidate_ids=torch.ones((9, 1), dtype=torch.int64))
    if loss.takes_several:
        named = named.with_tokens(**{field: batch[field][:, None] for field in loss.inputs})
    assert loss.requires == loss.inputs.keys()
    assert loss.over_candidates().requires == {*loss.inputs, "candidate_ids"}
    assert float(loss.over_candidates()(logprobs[:, None], named)[0]) == close(HAND[name][0])


def test_cross_entropy_of_several_targets_sums_over_all() -> None:
    # One position with targets of probabilities 1/2 and 1/4, one with 1/8 and padding: log 2 (3 * 1 - 1 * 2 + 2 * 3).
    shape = TokenBatch.from_sequences([[1, 1, 1]], [[True] * 3])
    weights = torch.tensor([[NAN, NAN], [3.0, -1.0], [2.0, 0.0]], dtype=torch.float64)
    batch = replace(shape, loss_weights=shape.mask.float()).with_tokens(weights=weights)
    logprobs = torch.tensor([[NAN, NAN], [1 / 2, 1 / 4], [1 / 8, 1 / 9]], dtype=torch.float64).log().requires_grad_()
    value, metrics = loss_named("cross_entropy").over_candidates()(logprobs, batch)
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == close(7 * LOG2)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0], [-3.0, 1.0], [-2.0, 0.0]]
    assert values(metrics) == close({"loss:sum": 7 * LOG2, "weights:sum": 4.0, "tokens:sum": 3.0})


def test_cross_entropy_has_the_gradient_of_a_loss_that_runs_in_the_client() -> None:
    # C = a sum with signs of its own plus a product of two, so dC/dp is of both signs.
    logprobs = torch.tensor([math.log(p) for p in P], dtype=torch.float64, requires_grad=True)
    signs = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, -3.0], dtype=torch.float64)
    (slopes,) = torch.autograd.grad((signs * logprobs).sum() + logprobs[0] * logprobs[4], logprobs)
    assert slopes.tolist() == close([1 + math.log(0.6), -1.0, 2.0, -2.0, 0.5 - LOG2, -3.0])
    _, gradient, _ = evaluated(loss_named("cross_entropy"), batch_of(weights=(-slopes).tolist()))
    assert gradient == close(slopes.tolist())


def test_settings_change_the_bounds() -> None:
    # ppo within [0.5, 3]: min(2, 2), -2, min(0.75, 1.5), 0, min(-3, -3), min(-2, -2): importance sampling. At its
    # bounds a ratio keeps its gradient.
    value, gradient, metrics = evaluated(
        loss_named("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}), batch_of()
    )
    assert (value, gradient) == (close(4.25), close(HAND["importance_sampling"][1]))
    assert metrics["clipped_tokens:sum"] == 1.0
    # cispo within [1, 2.5]: weights 2, 1, 1, 1, 2.5, 1; the gradient is -weight * A.
    _, gradient, _ = evaluated(loss_named("cispo", {"clip_low_threshold": 1.0, "clip_high_threshold": 2.5}), batch_of())
    assert gradient == close([-2.0, 2.0, -3.0, 0.0, 2.5, 4.0])
    # gspo within [0, 1.5]: sqrt(2) is no longer clipped.
    _, gradient, _ = evaluated(loss_named("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1.5}), batch_of())
    assert gradient[0] == close(-math.sqrt(2))


@pytest.mark.parametrize(("name", "expected"), [("ppo", [-2.0, 2.0, 0.0]), ("cispo", [-2.0, 2.0, -1.5])])
def test_a_datum_can_have_bounds_of_its_own_at_each_token(name: str, expected: list[float]) -> None:
    # r = 2 within [0.8, 2.5]: kept. r = 1/4 within [0.5, 1.2] with A = 3: cispo's weight is 1/2; ppo takes
    # min(0.75, 1.5), and within [0.1, 0.2] min(0.75, 0.6): clipped.
    high, low = [2.5, *[1.2] * 5], [0.8, 0.8, 0.5, 0.8, 0.8, 0.8]
    if name == "ppo":
        high[2], low[2] = 0.2, 0.1
    batch = batch_of(clip_high_threshold=high, clip_low_threshold=low)
    _, gradient, _ = evaluated(loss_named(name), batch)
    assert gradient[:3] == close(expected)


def test_the_sequence_ratio_is_of_the_tokens_that_count_alone() -> None:
    # The third datum with all three log ratios: (0 + log 3 - log 2) / 3. What is masked out has the same ratio.
    _, gradient, _ = evaluated(loss_named("gspo"), batch_of(sequence_ratio_mask=[1.0] * 6))
    assert gradient[4:] == close([1.5 ** (1 / 3), 4 * 1.5 ** (1 / 3)])
    # Only the first token of the first datum counts, with log 2; none of the second: ratio 1, within the bounds.
    _, gradient, _ = evaluated(loss_named("gspo"), batch_of(sequence_ratio_mask=[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    assert gradient == close([0.0, 4.0, -3.0, 0.0, 1.0, 4.0])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [19.0, 90.0, -90.0, 1e4, -1e4])
def test_no_log_ratio_makes_a_loss_or_its_gradient_infinite(name: str, log_ratio: float) -> None:
    loss = loss_named(name)
    batch = with_defaults(batch_of(logprobs=[math.log(p) - log_ratio for p in P]), loss)
    batch = batch.with_tokens(**{field: batch[field].float() for field in loss.inputs})
    logprobs = laid_out([math.log(p) for p in P]).float().requires_grad_()
    value, metrics = loss(logprobs, batch)
    value.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())
    assert all(math.isfinite(number) for number in [value.item(), *values(metrics).values()])


def test_the_reported_loss_has_not_the_rounding_of_a_long_sum() -> None:
    # 2^24 + 1 and four million ones: float32 alone cannot count on from 2^24 one by one.
    count = 1 << 22
    shape = TokenBatch.from_sequences([[1] * (count + 2)], [[True] * (count + 2)])
    weights = torch.ones(count + 2)
    weights[1] = 2.0**24 + 2
    batch = replace(shape, loss_weights=shape.mask.float()).with_tokens(weights=weights)
    _, metrics = loss_named("cross_entropy")(-torch.ones(count + 2), batch)
    assert values(metrics)["loss:sum"] == 2**24 + 2 + count


# Names and settings


def test_defaults_are_those_of_the_api() -> None:
    bounds = {
        name: (loss.clip_low_threshold, loss.clip_high_threshold)  # type: ignore[attr-defined]
        for name, loss in ((name, loss_named(name, {})) for name in ("ppo", "cispo", "gspo"))
    }
    assert bounds == {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}
    assert loss_named("dro") == loss_named("dro", {"beta": 0.05}) != loss_named("dro", {"beta": 0.1})


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("importance-sampling", ["importance-sampling", "importance_sampling"]),
        ("Cross_Entropy", ["cross_entropy"]),
        ("gspo2", ["gspo"]),
        ("banana", [*LOSSES]),
        ("", [*LOSSES]),
        ("stable_reinforce", ["stable_reinforce", "importance_sampling", "cispo"]),
        ("custom", ["forward_backward_custom"]),
    ],
)
def test_another_loss_is_refused_with_what_there_is(name: str, facts: list[str], raises: Raises) -> None:
    with raises(UsageError, *facts):
        loss_named(name)


@pytest.mark.parametrize(
    ("name", "key", "value", "facts"),
    [
        ("ppo", "clip_hi_threshold", 1.2, ["clip_hi_threshold", "clip_high_threshold"]),
        ("ppo", "beta", 0.1, ["beta", "clip_low_threshold", "clip_high_threshold"]),
        ("importance_sampling", "beta", 0.1, ["beta", "loss_fn_config"]),
        ("cross_entropy", "clip_low_threshold", 0.8, ["clip_low_threshold"]),
        ("dro", "beta", -0.1, ["-0.1", "0"]),
        ("dro", "beta", NAN, ["nan"]),
        ("dro", "beta", math.inf, ["inf"]),
        ("dro", "beta", "0.05", ["'0.05'"]),
        ("dro", "beta", True, ["True"]),
        ("ppo", "clip_high_threshold", 0.28, ["clip_high_threshold", "0.28", "1"]),
        ("gspo", "clip_low_threshold", 1.1, ["clip_low_threshold", "1.1", "1"]),
        ("cispo", "clip_low_threshold", -1.0, ["clip_low_threshold", "0"]),
    ],
)
def test_another_setting_is_refused(name: str, key: str, value: float | str, facts: list[str], raises: Raises) -> None:
    with raises(UsageError, *facts):
        loss_named(name, {key: value})
