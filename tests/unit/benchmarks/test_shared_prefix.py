"""The benchmark of the shared layout compares sides that compute the same thing; one of them nobody here wrote."""

from __future__ import annotations

import pytest

pytest.importorskip("prefix_grouper", reason="the yardstick is not installed: pip install prefix_grouper")


@pytest.mark.parametrize("case", ["p12r5g4", "p3r9g2"])
def test_prefix_grouper_and_every_layout_agree(case, load_benchmark, tmp_path):
    benchmark = load_benchmark("shared_prefix")
    folder = benchmark.write_model("qwen0.8m", tmp_path, "float32")
    batch = benchmark.batch_of(case)
    padded, shared, grouper = (benchmark.Nemorl(folder, "padded", "float32"),
                               benchmark.Nemorl(folder, "shared", "float32"),
                               benchmark.Grouper(folder, "", "float32"))  # fmt: skip
    wanted = grouper.logprobs(batch)
    for side in (padded, shared):
        assert float((side.logprobs(batch) - wanted).abs().max()) <= 5e-6
    norm = grouper.step(batch)
    for side in (padded, shared):
        assert side.step(batch) == pytest.approx(norm, rel=5e-6)


def test_cases_are_read_from_their_names(load_benchmark):
    benchmark = load_benchmark("shared_prefix")
    ids, prompt_tokens = benchmark.sequences("p12r5g4")
    assert (len(ids), len(ids[0]), prompt_tokens) == (4, 17, 12)
    assert benchmark.PrefixForest.of_batch(benchmark.batch_of("tree")).tokens == 128 + 4 * 96 + 16 * 63
    with pytest.raises(SystemExit):
        benchmark.sequences("p12")
