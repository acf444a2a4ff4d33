"""The contract of report sections, and what this one promises besides."""

from __future__ import annotations

from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Section, Table
from nemorl_testing import conformance

from nemorl_example.config import ExampleConfig

test_conformance = conformance("report_sections", "example")


def test_the_prompt_with_the_lowest_mean_reward_comes_first() -> None:
    scored = [("easy", 1.0), ("hard", 0.0), ("easy", 0.5), ("hard", 0.5)]
    run = RunData("run", samples=tuple({"prompt": prompt, "reward": reward} for prompt, reward in scored))
    section = ExampleConfig(count=1).build()(run)
    assert isinstance(section, Section)
    table = section.blocks[-1]
    assert isinstance(table, Table)
    assert table.rows == [["hard", 2, 0.25]]  # of two


def test_a_run_without_samples_has_no_such_section() -> None:
    assert ExampleConfig().build()(RunData("run", samples=({"text": "of an older version"},))) is None
