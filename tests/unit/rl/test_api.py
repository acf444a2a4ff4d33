"""The short ways: train functions, data in every form, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.errors import ConfigError, DataError, PluginNotFoundError, UsageError
from nemorl.plugins import Index, PluginPolicy, Registry
from nemorl.run import TrainResult
from nemorl_math_env.config import ArithmeticConfig
from nemorl_rl.data.rows import RowDataModule, as_rows, named_dataset, rows_of
from nemorl_tasks.datasets import FileConfig, HuggingFaceConfig
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(6)]
SMALL: dict[str, Any] = {
    "max_steps": 2,
    "policy": {"init": "random", "max_sequence_tokens": 32},
    "validation": {"every": 0, "at_end": False},
    "checkpoint": {"every": 0, "export": False},
}
SFT: dict[str, Any] = {**SMALL, "batch_size": 2}
GRPO: dict[str, Any] = {
    **SMALL,
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "generation": {"max_new_tokens": 3},
}


# Training


def test_one_call_trains_on_a_reward(tiny_model: Path, tmp_path: Path) -> None:
    result = nemorl.train(
        model=str(tiny_model),
        dataset=ROWS,
        reward_fn=lambda prompt, response: float("1" in response),
        run_dir=tmp_path / "run",
        **GRPO,
    )
    assert result.steps == 2
    assert 0 <= result.metrics["train/reward"] <= 1
    assert [record["step"] for record in result.history] == [1, 2]
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.parent.parent == result.run_dir == tmp_path / "run"


@pytest.mark.slow
def test_each_helper_trains_its_algorithm(tiny_model: Path, tmp_path: Path) -> None:
    reward: Callable[[str, str], float] = lambda prompt, response: 1.0  # noqa: E731
    grpo = nemorl.train_grpo(str(tiny_model), ROWS, reward, run_dir=tmp_path / "grpo", **GRPO)
    sft = nemorl.train_sft(str(tiny_model), ROWS, val_dataset=ROWS, run_dir=tmp_path / "sft", **SFT)
    assert "train/reward" in grpo.metrics
    assert "train/loss" in sft.metrics
    assert "algorithm: sft" in (sft.run_dir / "config.yaml").read_text()


def test_an_algorithm_that_is_not_installed_says_what_to_install(raises: Raises) -> None:
    everything = Index.installed()
    without = Registry(everything.narrowed(PluginPolicy()))
    without.index = Index([point for point in everything.points if point.name != "dpo"])
    with use_registry(without), raises(PluginNotFoundError, "dpo", "nemorl-preference"):
        nemorl.train_dpo("some/model", ROWS)


def test_every_wrong_knob_is_named(raises: Raises) -> None:
    with raises(ConfigError, "'max_steps'", path=["policy.precision", "max_step"]):
        nemorl.train("some/model", ROWS, lambda prompt, response: 1.0, max_step=3, policy={"precision": "float7"})


def test_a_trainer_by_the_name_of_its_algorithm(tiny_model: Path) -> None:
    trainer = nemorl.Trainer.from_pretrained(str(tiny_model), algorithm="sft", batch_size=3)
    assert type(trainer) is nemorl.SFTTrainer
    assert (trainer.config.policy.model_name, trainer.config.batch_size) == (str(tiny_model), 3)


# Data: what a name or path means


def write(path: Path, count: int, start: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(start, start + count)))
    return path


def prompts(rows: Any) -> list[str] | None:
    return None if rows is None else [rows[number]["prompt"] for number in range(len(rows))]


def test_an_installed_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "arithmetic/train.jsonl", 2)
    assert isinstance(named_dataset("arithmetic"), ArithmeticConfig)
    assert isinstance(named_dataset("nemorl-math-env:arithmetic"), ArithmeticConfig)
    assert prompts(rows_of("./arithmetic", "train")) == ["0", "1"]


def test_a_path_is_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", 3)
    for source in (file, str(file)):
        assert isinstance(named_dataset(source), FileConfig)
        assert prompts(rows_of(source, "train")) == ["0", "1", "2"]
        assert rows_of(source, "validation") is None
    table = tmp_path / "mine.csv"
    table.write_text("question,answer\n1+1,2\n")
    assert prompts(rows_of(table, "train")) == ["1+1"]


def test_a_folder_is_its_files_by_split(tmp_path: Path) -> None:
    write(tmp_path / "train-00000.jsonl", 2)
    write(tmp_path / "train-00001.jsonl", 1, start=2)
    write(tmp_path / "validation.jsonl", 1, start=9)
    write(tmp_path / "test.jsonl", 1, start=99)
    (tmp_path / "README.md").write_text("about")
    rows = rows_of(tmp_path, "train")
    assert prompts(rows) == ["0", "1", "2"]
    assert rows is not None
    assert [row["prompt"] for row in rows[1:]] == ["1", "2"]
    assert rows[-1]["prompt"] == "2"
    assert prompts(rows_of(tmp_path, "validation")) == ["9"]


def test_a_folder_of_other_names_is_all_to_train_on(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 1)
    write(tmp_path / "trainees.jsonl", 1, start=1)
    assert prompts(rows_of(str(tmp_path), "train")) == ["0", "1"]
    assert rows_of(str(tmp_path), "validation") is None


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({"train.jsonl": 1, "more.jsonl": 1}, ["more.jsonl"]),
        ({"notes.txt": 1}, []),
        ({"validation.jsonl": 1}, []),
        ({"train.jsonl": 1, "train.val.jsonl": 1}, ["train.val.jsonl"]),
        ({"dataset_dict.json": 1}, ["save_to_disk"]),
    ],
)
def test_a_folder_that_is_not_clear_is_refused(
    tmp_path: Path, files: dict[str, int], facts: list[str], raises: Raises
) -> None:
    for name, count in files.items():
        write(tmp_path / name, count)
    with raises(UsageError, *facts, "fix:"):
        named_dataset(tmp_path)


LAYOUTS = [
    ("train.jsonl", "validation.jsonl", "test.jsonl"), ("train-0.jsonl", "train-1.jsonl", "dev.jsonl"),
    ("gsm8k_train.jsonl", "gsm8k_test.jsonl"), ("train1.csv", "train2.csv", "test1.csv"), ("a.csv", "trainees.csv"),
    ("contest.jsonl", "math.jsonl"), ("my training.csv", "my evaluation.csv"), ("latest.json", "pretrained.json"),
    ("x.train.jsonl", "y-valid-1.jsonl"), ("train.csv", "train2.jsonl", "val.csv"),
    ("train.jsonl", "dataset_info.json"),
]  # fmt: skip


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0])
def test_the_files_of_a_folder_are_split_as_the_datasets_library_splits_them(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    from datasets.data_files import DataFilesDict, get_data_patterns

    for number, name in enumerate(names):
        text = f"prompt\n{number}\n" if name.endswith(".csv") else json.dumps({"prompt": str(number)})
        (tmp_path / name).write_text(text)
    peers = DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), base_path=str(tmp_path))
    found = {str(split): sorted(str(names.index(Path(file).name)) for file in files) for split, files in peers.items()}
    assert sorted(prompts(rows_of(tmp_path, "train")) or ()) == found["train"]
    assert prompts(rows_of(tmp_path, "validation")) == found.get("validation", found.get("test"))


def test_capital_letters_in_a_name_are_no_other_split(tmp_path: Path) -> None:
    write(tmp_path / "Train.jsonl", 1)
    write(tmp_path / "Test.jsonl", 1, start=9)
    assert [prompts(rows_of(tmp_path, split)) for split in ("train", "validation")] == [["0"], ["9"]]


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("no_cache")
def test_a_folder_of_folders_is_read_like_a_repository_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "dataset_infos.json").write_text("{}")
    write(tmp_path / "data/train-00000-of-00002.jsonl", 2)
    write(tmp_path / "data/train-00001-of-00002.jsonl", 1, start=2)
    write(tmp_path / "data/test-00000-of-00001.jsonl", 1, start=9)
    assert isinstance(named_dataset(tmp_path), HuggingFaceConfig)
    assert [prompts(rows_of(tmp_path, split)) for split in ("train", "validation")] == [["0", "1", "2"], ["9"]]


@pytest.mark.usefixtures("no_cache")
def test_a_repository_of_other_splits_says_which_it_has(tmp_path: Path, raises: Raises) -> None:
    for split in ("train_sft", "train_prefs"):  # as one they would be two data sets in one
        write(tmp_path / f"data/{split}-00000-of-00001.jsonl", 1)
    with raises(UsageError, "train", "train_prefs", "train_sft"):
        named_dataset(tmp_path)
    configs = "".join(f"- {{config_name: {name}, data_files: data/train_{name}*}}\n" for name in ("sft", "prefs"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with raises(UsageError, "sft", "prefs"):
        named_dataset(tmp_path)
    write(tmp_path / "hidden/.git/objects/config.json", 1)
    with raises(UsageError):
        named_dataset(tmp_path / "hidden")


def test_org_and_name_are_a_dataset_of_the_hub() -> None:
    config = named_dataset("nvidia/OpenMathInstruct-2")
    assert isinstance(config, HuggingFaceConfig)
    assert config.path == "nvidia/OpenMathInstruct-2"


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("arithmetics", "'arithmetic'"),
        ("no such thing", "'no"),
        ("data/train.jsonl", "data/train.jsonl"),  # not the hub's: the suffix says that a file was meant
    ],
)
def test_a_name_that_nothing_has_is_refused(name: str, fact: str, raises: Raises) -> None:
    with raises(UsageError, fact):
        rows_of(name, "train")


def test_a_file_beside_the_misspelt_one_is_offered(tmp_path: Path, raises: Raises) -> None:
    write(tmp_path / "train.jsonl", 1)
    with raises(UsageError, "train.jsonl", varies=r"(?<=no dataset )\S+"):
        named_dataset(str(tmp_path / "tran.jsonl"))


def test_a_mapping_with_a_name_has_options(raises: Raises) -> None:
    rows = rows_of({"name": "arithmetic", "num_train": 3, "num_validation": 0}, "train")
    assert rows is not None
    assert len(rows) == 3
    with raises(ConfigError, "num_train", path="num_trains"):
        rows_of({"name": "arithmetic", "num_trains": 3}, "train")
    with raises(PluginNotFoundError, "arithmetik"):
        rows_of({"name": "arithmetik"}, "train")


# Data: rows in memory


@pytest.fixture(scope="module")
def hf_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


def test_both_splits_in_one_mapping(hf_dataset: Any, raises: Raises) -> None:
    import datasets

    both = datasets.DatasetDict({"train": hf_dataset, "validation": hf_dataset.select([0])})
    for source in (both, {"train": ROWS, "validation": ROWS[:1]}):
        assert prompts(rows_of(source, "train")) == [row["prompt"] for row in ROWS]
        assert prompts(rows_of(source, "validation")) == ["0+1="]
    assert rows_of({"train": ROWS}, "validation") is None
    assert prompts(rows_of({"train": ROWS, "test": ROWS[:2]}, "validation")) == ["0+1=", "1+1="]
    with raises(UsageError):
        rows_of({"rows": ROWS}, "train")


def test_a_run_trains_on_a_dataset_of_the_library(hf_dataset: Any, tiny_model: Path, tmp_path: Path) -> None:
    import datasets

    both = datasets.DatasetDict({"train": hf_dataset, "validation": hf_dataset})
    settings = {**SFT, "validation": {"every": 0, "at_end": True}, "run_dir": tmp_path / "run"}
    result = nemorl.SFTTrainer.from_pretrained(str(tiny_model), **settings).fit(train_dataset=both)
    assert "validation/val_loss" in result.metrics


def test_a_run_trains_on_a_data_module(tiny_model: Path, tmp_path: Path) -> None:
    module = RowDataModule(ROWS, 2, seed=1)
    result = nemorl.train_sft(str(tiny_model), module, run_dir=tmp_path / "run", **SFT)
    assert result.steps == 2
    assert module.epoch == 0
    assert module.state_dict()["position"] == 4


def lazy() -> Iterator[dict[str, str]]:
    yield {"prompt": "1"}


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        (lazy(), "generator"),
        ("text", "str"),
        (["1+1="], "'1+1='"),
        ({"prompt": ["1"]}, "dict"),
        (7, "int"),
    ],
)
def test_what_is_no_table_is_refused(source: Any, fact: str, raises: Raises) -> None:
    with raises(UsageError, fact, "datasets.Dataset"):
        as_rows(source)


def test_a_data_frame_is_its_rows_and_what_is_missing_in_it_is_none(raises: Raises) -> None:
    pandas = pytest.importorskip("pandas")
    assert list(as_rows(pandas.DataFrame(ROWS))) == ROWS
    frame = pandas.DataFrame({"prompt": ["a", "b"], "level": [1.0, None], "turns": [[1, 2], [3]]}, index=[7, 9])
    assert list(as_rows(frame)) == [
        {"prompt": "a", "level": 1.0, "turns": [1, 2]},
        {"prompt": "b", "level": None, "turns": [3]},
    ]
    with raises(UsageError):
        as_rows(pandas.DataFrame([[1, 2]], columns=["prompt", "prompt"]))
    with raises(UsageError):
        as_rows(frame["turns"])


def test_no_rows_at_all_are_refused(tiny_model: Path, raises: Raises) -> None:
    with raises(DataError):
        nemorl.train_sft(str(tiny_model), [], **SFT)


# Results


def result_of(run_dir: Path, **changes: Any) -> TrainResult:
    history = [{"step": step, "train/reward": step / 10, "train/loss": -1.0} for step in range(1, 6)]
    return TrainResult(**{
        "metrics": dict(history[-1]),
        "history": history,
        "run_dir": run_dir,
        "best_checkpoint": run_dir / "checkpoints/step_000004",
        "steps": 5,
        **changes,
    })  # fmt: skip


def test_a_result_says_what_matters(tmp_path: Path) -> None:
    assert repr(result_of(Path("runs/a"))) == (
        "TrainResult(5 steps in runs/a, train/reward 0.5, train/loss -1, best checkpoint step_000004)"
    )
    stopped = result_of(Path("runs/a"), stopped="received SIGTERM", best_checkpoint=None, metrics={})
    assert repr(stopped) == "TrainResult(5 steps in runs/a, stopped: received SIGTERM)"


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_written_and_returned(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (nemorl-cli[plot])")
    figure = result_of(tmp_path).plot(tmp_path / f"new/curves.{suffix}")
    assert (tmp_path / f"new/curves.{suffix}").read_bytes().startswith(magic)
    assert [panel.get_ylabel() for panel in figure.axes] == ["train/reward", "train/loss"]
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(line.get_ydata()) == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_the_plot_of_a_resumed_run_has_all_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (nemorl-cli[plot])")
    records = [{"step": step, "time": 0.0, "train/loss": float(step)} for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    figure = result_of(tmp_path, history=records[2:]).plot()
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 2, 3]


def test_a_metric_that_was_never_logged_cannot_be_plotted(tmp_path: Path, raises: Raises) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (nemorl-cli[plot])")
    with raises(UsageError, "train/rewards", "train/reward"):
        result_of(tmp_path).plot(metrics=["train/rewards"])
    with raises(UsageError):
        result_of(tmp_path, history=[]).plot()


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl_cli.report.plot.find_spec", lambda _name: None)
    with pytest.raises(UsageError) as caught:
        TrainResult({}, [], Path("runs/a"), None, 0).plot()
    assert str(caught.value.fix).startswith('pip install "nemorl-cli[plot]"')
