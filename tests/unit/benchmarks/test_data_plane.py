"""The data plane's benchmark: it drives the real step, whose numbers do not depend on how many ranks there are."""

from __future__ import annotations

import pytest


def test_the_numbers_of_a_step_do_not_depend_on_the_ranks(load_benchmark) -> None:
    benchmark = load_benchmark("data_plane")
    one, many = (benchmark.one_step(32, 400, ranks, decode=None, profile=False) for ranks in (1, 5))
    assert one["tokens"] == many["tokens"] == pytest.approx(32 * 400, rel=0.2)
    added = {"advantages", "old_logprobs", "reference_logprobs", "generation_logprobs"}
    for name, value in one["numbers"].items():
        wanted = pytest.approx(value, rel=1e-5) if name in added else value  # these the ranks add up, each its own
        assert many["numbers"][name] == wanted, name
