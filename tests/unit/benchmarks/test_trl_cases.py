"""The cases of the benchmarks beside TRL: sizes are what their names say."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def cases(load_benchmark):
    return load_benchmark("_grpo_cases")


def test_sizes_are_those_of_the_name(cases):
    case = cases.case_of("p512r64g16", 1e-6, None)
    # 64 responses in groups of 16 are of 4 prompts; a character is a token.
    assert [len(row["prompt"]) for row in case.rows] == [512] * 4
    assert (case.prompts_per_step, case.group_size, case.new_tokens) == (4, 16, 64)
    assert len({row["prompt"] for row in case.rows}) == 4
    old = cases.case_of("256", 1e-6, None)
    assert (len(old.rows), old.group_size, old.new_tokens) == (8, 8, 256)


@pytest.mark.parametrize("name", ["p128", "p128r64g7", "p0r64g8", "long", "smollm2"])
def test_other_names_are_refused(cases, name):
    with pytest.raises(ValueError, match=name):
        cases.case_of(name, 1e-6, None)


def test_the_recipe_is_that_of_the_example(cases):
    from pathlib import Path

    import yaml

    config = yaml.safe_load((Path(__file__).parents[3] / "examples/smollm2/grpo_word_problems.yaml").read_text())
    case = cases._recipe()
    assert case.prompts_per_step == config["num_prompts_per_step"]
    assert case.group_size == config["num_generations_per_prompt"]
    assert (case.new_tokens, case.temperature) == tuple(config["generation"].values())
    assert (case.precision, case.lr) == (config["policy"]["precision"], config["policy"]["optimizer"]["lr"])
    assert config["data"]["instruction"] in case.rows[0]["prompt"][0]["content"]
    assert cases.last_number_is_right("that makes 1,234 apples.", "1234") == 1.0
    assert cases.last_number_is_right("12 and then 13", "12") == 0.0


def test_pairs_of_exact_sizes(load_benchmark):
    rows = load_benchmark("dpo_vs_trl").make_rows("p256r128", 3, seed=0)
    assert {(len(row["prompt"]), len(row["chosen"]), len(row["rejected"])) for row in rows} == {(256, 128, 128)}


def test_products_of_matrices_are_timed(load_benchmark):
    speeds = load_benchmark("_matrices").matrix_speeds()
    assert all(speed > 0 for speed in speeds.values())
    assert any("float32" in name for name in speeds)
    assert "_matrices" in sys.modules
