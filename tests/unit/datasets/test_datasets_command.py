import json

from nemorl.errors import UsageError
from nemorl_tasks.datasets.command import app
from recorded_messages import Raises
from typer.testing import CliRunner


def output(*arguments):
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_list_has_name_task_rows_and_licence():
    (line,) = [line for line in output().splitlines() if line.startswith("GSM8K")]
    assert "math" in line
    assert "7,473 train, 1,319 test" in line
    assert "MIT" in line


def test_one_task_as_json():
    found = json.loads(output("--task", "multiple choice", "--json"))
    assert {entry["task"] for entry in found} == {"multiple choice"}
    assert "gpqa_diamond" in next(entry["other_names"] for entry in found if entry["name"] == "GPQA")


def test_one_dataset_is_described_as_a_config_would_use_it():
    text = output("gpqa-diamond")
    assert "Idavidrein/gpqa" in text
    assert "data: {name: gpqa_diamond, max_rows: 100}" in text
    assert json.loads(output("gsm8k", "--json"))["answer_after"] == "####"


def test_mistyped_names_and_tasks_are_corrected(raises: Raises):
    with raises(UsageError, "GSM8K"):
        output("gsmk8")
    with raises(UsageError, "math"):
        output("--task", "maths")
