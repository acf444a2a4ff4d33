"""Randomness and truncation, on distributions given by hand."""

from __future__ import annotations

import math

import torch
from nemorl.types import SamplingParams
from nemorl_tensors.engines.sampling import RowSampler, inverse_cdf, uniforms
from torch import Tensor

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def _sampler(*params: SamplingParams, first_seed: int = 0) -> RowSampler:
    sampler = RowSampler(CPU)
    sampler.add(params, range(first_seed, first_seed + len(params)), [0] * len(params))
    return sampler


def _draws(params: SamplingParams, rows: int = 2000, logits: Tensor = LOGITS) -> Tensor:
    return _sampler(*[params] * rows).sample(logits.expand(rows, -1))[0]


def test_uniforms_are_reproducible_and_below_one() -> None:
    seeds, positions = torch.arange(100)[:, None], torch.arange(50)
    numbers = uniforms(seeds, positions)
    assert torch.equal(numbers, uniforms(seeds, positions))
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert numbers.unique().numel() == 5000  # type: ignore[no-untyped-call]


def test_uniforms_match_splitmix64() -> None:
    mask = (1 << 64) - 1

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    expected = (mix((mix(123456789) + 4 * 0x9E3779B97F4A7C15) & mask) >> 12) * 2.0**-52
    assert uniforms(torch.tensor([123456789]), torch.tensor([3])).item() == expected


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    numbers = uniforms(torch.arange(1000)[:, None], torch.arange(20)) - 0.5
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        # The correlation of n independent pairs has standard deviation 1/sqrt(n) = 0.007; 4 of them.
        assert abs((a * b).mean() * 12) < 4 / math.sqrt(a.numel())


def test_draws_follow_the_distribution() -> None:
    counts = _draws(SamplingParams(), rows=20000).bincount(minlength=4).double()
    expected = LOGITS.double().exp() * 20000
    # chi-square with 3 degrees of freedom exceeds 16.3 with probability 0.001
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


def test_temperature_sharpens_draws_and_logprobs() -> None:
    # p^2 of (.5, .25, .15, .1) is (.25, .0625, .0225, .01), which sums to .345
    sampler = _sampler(*[SamplingParams(temperature=0.5)] * 20000)
    tokens, logprobs = sampler.sample(LOGITS.expand(20000, -1))
    assert abs((tokens == 0).double().mean() - 0.25 / 0.345) < 0.013
    torch.testing.assert_close(logprobs[tokens == 0][0], torch.tensor(math.log(0.25 / 0.345)))


def test_top_k_keeps_the_k_most_likely() -> None:
    tokens = _draws(SamplingParams(top_k=2))
    assert set(tokens.tolist()) == {0, 1}
    assert abs((tokens == 0).double().mean() - 2 / 3) < 0.04


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # 0.5 + 0.25 < 0.8 <= 0.5 + 0.25 + 0.15
    assert set(_draws(SamplingParams(top_p=0.8)).tolist()) == {0, 1, 2}
    assert set(_draws(SamplingParams(top_p=0.4)).tolist()) == {0}


def test_min_p_drops_tokens_far_below_the_most_likely() -> None:
    # 0.4 * 0.5 = 0.2: tokens of 0.15 and 0.1 go.
    assert set(_draws(SamplingParams(min_p=0.4)).tolist()) == {0, 1}


def test_truncation_does_not_renormalise_the_logprob() -> None:
    tokens, logprobs = _sampler(SamplingParams(top_k=1)).sample(LOGITS[None])
    assert tokens.tolist() == [0]
    torch.testing.assert_close(logprobs, torch.tensor([0.5]).log())


def test_greedy_rows_take_the_most_likely_token_at_temperature_one() -> None:
    tokens, logprobs = _sampler(SamplingParams(temperature=0)).sample(LOGITS.flip(0)[None])
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logprobs, torch.tensor([0.5]).log())


def test_rows_with_different_settings_draw_as_if_alone() -> None:
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_p=0.6),
        SamplingParams(top_k=3),
        SamplingParams(min_p=0.3, temperature=2.0),
    ] * 40
    logits = torch.randn(len(settings), 30, generator=torch.Generator().manual_seed(0))
    together = _sampler(*settings).sample(logits)
    for row, params in enumerate(settings):
        token, logprob = _sampler(params, first_seed=row).sample(logits[row : row + 1])
        assert token[0] == together[0][row]
        torch.testing.assert_close(logprob[0], together[1][row])


def test_a_row_draws_the_same_whoever_joins_and_leaves() -> None:
    logits = torch.zeros(1, 1000)
    alone = _sampler(SamplingParams(), first_seed=7)
    expected = [alone.sample(logits)[0].item() for _ in range(150)]
    crowd = _sampler(*[SamplingParams()] * 3, first_seed=5)  # seeds 5, 6, 7
    row, drawn = 2, []
    for step in range(150):
        if step == 40:
            crowd.add([SamplingParams()] * 2, [1, 2], [0, 0])
        if step == 70:
            crowd.keep([4, 2, 0])
            row = 1
        drawn.append(crowd.sample(logits.expand(len(crowd._params), -1))[0][row].item())
    assert drawn == expected


def test_seeds_are_64_bit_numbers() -> None:
    sampler = RowSampler(CPU)
    sampler.add([SamplingParams()] * 2, [2**64 - 1, 2**63], [0, 0])
    assert sampler.sample(torch.zeros(2, 10))[0].shape == (2,)


def test_the_inverse_cdf_never_draws_weight_zero() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]])
    edges = torch.tensor([0.0, 1 / 3, 1 - 2.0**-52], dtype=torch.float64)
    assert inverse_cdf(weights.expand(3, -1), edges).tolist() in ([1, 3, 3], [1, 1, 3])
