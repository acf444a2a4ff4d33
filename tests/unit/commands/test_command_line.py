"""The commands on a tiny model: what they print, what they write, how they exit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command, Done
from nemorl import __version__
from nemorl.base.files.ownership import Owner
from nemorl.plugins.index import Index
from nemorl.plugins.kinds import HookConfig
from nemorl.plugins.registry import Registry
from nemorl_cli import app as tree
from nemorl_cli import main, terminal
from nemorl_cli.help_texts import PANELS
from nemorl_cli.plugins import listed
from nemorl_cli.report.records.reading import read_records
from nemorl_testing.plugin import use_registry
from rich.console import Console as RichConsole


def settings(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "model": str(model),
        "max_steps": 1,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "generation": {"max_new_tokens": 3},
        "validation": {"max_samples": 4},
        "data": {"name": "arithmetic", "max_digits": 1, "num_train": 20, "num_validation": 5},
        "environment": {"name": "math", "require_marker": True},  # noise is graded without starting a grader process
        **changes,
    }


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(settings(tiny_model)))
    return path


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run. Tests that change it work on a copy."""
    from nemorl.config.load import load_config
    from nemorl_cli.console import Console

    run_dir = tmp_path_factory.mktemp("trained") / "run"
    load_config(settings(tiny_model, run_dir=str(run_dir)), for_launch=True).build().fit(console=Console(quiet=True))
    return run_dir


@pytest.mark.parametrize("arguments", ["plugins list", "runs --help", "no-such-command", "config show missing.yaml"])
def test_a_command_leaves_the_tree_of_commands_as_it_was(nemorl: Command, arguments: str) -> None:
    # Those of plugins were once added again by each command of a process, and the next one built them all.
    groups = (tree.app, *tree.GROUPS.values())
    before = [list(group.registered_commands) for group in groups]
    nemorl(*arguments.split())
    assert [group.registered_commands for group in groups] == before


def test_the_next_command_of_a_process_sees_the_plugins_that_are_there(
    nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "doctor" in nemorl("--help").out
    monkeypatch.setattr(tree, "registry", lambda: Registry(Index([])))
    assert "doctor" not in nemorl("--help").out
    assert nemorl("quickstart", "--help").code == 2


def test_a_command_of_a_package_that_is_not_installed_says_which(
    nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "registry", lambda: Registry(Index([])))
    done = nemorl("engines", "list", "runs/first")
    assert done.code == 2
    assert "pip install 'nemorl[agents]'" in done.err
    assert "engines" not in nemorl("--help").out
    assert "pip install 'nemorl[insight]'" in nemorl("view", "runs/first").err


def test_help_describes_commands_of_plugins_by_their_own_words(nemorl: Command) -> None:
    words = " ".join(nemorl("--help").out.replace("│", " ").split())
    assert "Count what a run takes of each device" in words
    assert "Train two steps of a config in small" in " ".join(nemorl("config").out.replace("│", " ").split())
    words = " ".join(nemorl("compare").out.replace("│", " ").split())
    assert "Find the first step, quantity and token at which two runs part." in words


def test_help_names_every_command(nemorl: Command) -> None:
    done = nemorl("--help")
    assert done.code == 0
    for command in (
        "train",
        "eval",
        "generate",
        "report",
        "doctor",
        "plugins",
        "config",
        "view",
        "compare",
    ):
        assert command in done.out


def test_help_names_at_most_twenty_one_commands_in_the_order_of_the_tasks(nemorl: Command) -> None:
    shown = [line.split()[1] for line in nemorl("--help").out.splitlines() if re.match(r"│ [a-z]", line)]
    known = [name for names in PANELS.values() for name in names]
    assert len(shown) <= 21
    assert shown == known


@pytest.mark.parametrize(
    "command",
    ["train", "eval", "generate", "report", "view samples", "view watch", "doctor", "plugins list", "config schema"],
)
def test_every_command_explains_itself_with_an_example(nemorl: Command, command: str) -> None:
    done = nemorl(*command.split(), "--help")
    assert done.code == 0
    assert f"nemorl {command}" in done.out


def test_the_version(nemorl: Command) -> None:
    assert nemorl("--version") == Done(0, f"nemorl {__version__}\n", "")


def test_an_unknown_command_exits_2(nemorl: Command) -> None:
    done = nemorl("tran")
    assert done.code == 2
    assert "No such command" in done.err


@pytest.mark.slow
def test_train_prints_a_result_and_progress_elsewhere(nemorl: Command, config: Path, tmp_path: Path) -> None:
    done = nemorl("train", config, "--run-dir", tmp_path / "run")
    assert done.code == 0
    assert done.out.startswith("1 steps\nvalidation/accuracy: ")
    assert f"report: {tmp_path}/run/report.html" in done.out
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.slow
def test_train_as_json_is_one_object_on_stdout_and_silence_elsewhere(
    nemorl: Command, config: Path, tmp_path: Path
) -> None:
    done = nemorl("train", config, "max_steps=2", "--run-dir", tmp_path / "run", "--json")
    assert done.code == 0
    assert done.json["steps"] == 2
    assert done.json["stopped"] is None
    assert "train/reward" in done.json["metrics"]
    assert Path(done.json["best_checkpoint"]).is_dir()
    assert done.err == ""


@pytest.mark.slow
def test_the_same_command_again_continues(nemorl: Command, config: Path) -> None:
    first, second = (nemorl("train", config, "--json").json for _ in range(2))
    assert first["run_dir"] == second["run_dir"]
    assert len((Path(first["run_dir"]) / "metrics.jsonl").read_text().splitlines()) == 2  # one step, one validation


@pytest.mark.slow
def test_fresh_starts_anew(nemorl: Command, config: Path) -> None:
    first, second = (nemorl("train", config, "--fresh", "--json").json for _ in range(2))
    assert second["run_dir"] == f"{first['run_dir']}-2"


class EnoughConfig(HookConfig):
    """Stops a run after every step."""

    def build(self) -> object:
        return Enough()


class Enough:
    def on_step_end(self, trainer: Any) -> None:
        trainer.stop("seen enough")


@pytest.mark.parametrize(
    "options", [[], ["--fresh"], ["--run-dir", "a run's; folder"]], ids=["default", "fresh", "named"]
)
@pytest.mark.slow
def test_a_stopped_run_continues_with_the_command_that_it_names(
    nemorl: Command, config: Path, options: list[str], tmp_path: Path
) -> None:
    scoped = Registry(Index.installed())
    scoped.register("hooks", "enough", EnoughConfig)
    with use_registry(scoped):
        if options == ["--fresh"]:
            nemorl("train", config, "max_steps=3", "plugins.hooks=[enough]", "generation.stop_strings=['a b']")
        first = nemorl(
            "train", config, "max_steps=3", "plugins.hooks=[enough]", "generation.stop_strings=['a b']", *options
        )
        assert first.out.startswith("1 steps, stopped: seen enough\nto continue: nemorl train ")
        command = shlex.split(first.out.splitlines()[1].removeprefix("to continue: "))
        second = nemorl(*command[1:], "--json").json
    assert (second["steps"], second["stopped"]) == (2, "seen enough")
    assert shlex.split(second["continue"]) == command
    assert f"{second['run_dir']}/report.html" in first.out


@pytest.mark.slow
def test_a_dry_run_writes_nothing(nemorl: Command, config: Path, tmp_path: Path) -> None:
    done = nemorl("train", config, "--dry-run")
    assert done.code == 0
    assert "ok, would run GRPOConfig in runs/grpo-" in done.out
    planned = nemorl("train", config, "--dry-run", "--json").json
    assert (planned["ok"], planned["config"], planned["run_dir"][:10]) == (True, "GRPOConfig", "runs/grpo-")
    assert [path.name for path in tmp_path.iterdir()] == ["grpo.yaml"]


@pytest.mark.slow
def test_debug_adds_the_traceback(nemorl: Command, config: Path) -> None:
    assert "Traceback" not in nemorl("train", config, "max_steps=ten").err
    assert "Traceback" in nemorl("train", config, "max_steps=ten", "--debug").err
    assert "Traceback" in nemorl("--debug", "train", config, "max_steps=ten").err


def test_eval_measures_a_config(nemorl: Command, config: Path, tmp_path: Path) -> None:
    done = nemorl(
        "eval", config, "--max-samples", 3, "--generations", 2, "--temperature", 1, "--output", tmp_path / "s.jsonl"
    )
    assert done.code == 0
    assert "pass@2" in done.out
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 6


@pytest.mark.slow
def test_eval_measures_a_run(nemorl: Command, trained: Path) -> None:
    done = nemorl("eval", trained, "--json")
    assert done.code == 0
    assert done.json["model"] == str(trained / "model")
    logged = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    last = next(record for record in reversed(logged) if "validation/accuracy" in record)
    assert done.json["accuracy"] == pytest.approx(last["validation/accuracy"])
    assert done.json["avg_length"] == pytest.approx(last["validation/avg_length"])


def test_eval_measures_another_model(nemorl: Command, config: Path, trained: Path) -> None:
    done = nemorl("eval", config, "--model", trained / "model", "--json")
    assert done.code == 0
    assert done.json["model"] == str(trained / "model")


def test_eval_needs_no_config(nemorl: Command, trained: Path) -> None:
    arguments = ["--model", trained / "model", "--data", "arithmetic", "--environment", "math", "--max-samples", 3]
    done = nemorl("eval", *arguments, "generation.max_new_tokens=3", "policy.max_sequence_tokens=64", "--json")
    assert done.code == 0, done.err
    assert done.json["dataset"] == "arithmetic"
    assert done.json["avg_length"] <= 3


@pytest.mark.slow
def test_eval_of_several_datasets_with_several_seeds(nemorl: Command, config: Path, tmp_path: Path) -> None:
    hard = tmp_path / "hard.jsonl"
    hard.write_text("".join(json.dumps({"prompt": f"{n}+9=", "answer": str(n + 9)}) + "\n" for n in range(2)))
    output = tmp_path / "samples.jsonl"
    output.write_text("left from before\n")
    options = ["--data", "arithmetic", "--data", hard, "--seeds", 2, "--temperature", 1, "--generations", 2]
    arguments = ["eval", config, *options, "--max-samples", 3, "--output", output]
    done = nemorl(*arguments, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    assert list(done.json["datasets"]) == ["arithmetic", str(hard)]
    for metrics in done.json["datasets"].values():
        assert set(metrics) == {*metrics["standard_errors"], "standard_errors"}
    records = [json.loads(line) for line in output.read_text().splitlines()]
    places = {(record["dataset"], record["seed"], record["index"]) for record in records}
    assert len(records) == 2 * len(places) == 2 * (2 * 3 + 2 * 2)

    shown = nemorl(*arguments)
    assert "±" in shown.out
    assert "hard.jsonl has no validation split: all its rows are used" in shown.err
    assert "arithmetic: 6 prompts" in shown.err


@pytest.mark.slow
def test_eval_writes_records_in_the_columns_of_a_run(nemorl: Command, config: Path, tmp_path: Path) -> None:
    hard = tmp_path / "hard.jsonl"
    hard.write_text('{"prompt": "1+9=", "answer": "10"}\n')
    options = ["--data", "arithmetic", "--data", hard, "--seeds", 2, "--temperature", 1, "--generations", 2]
    for _ in range(2):  # the second replaces the first
        done = nemorl("eval", config, *options, "--max-samples", 3, "--output", tmp_path / "answers", "--json")
        assert done.code == 0, done.err
    records = list(read_records(tmp_path / "answers"))
    found = [(record["dataset"], record["seed"]) for record in records]
    assert found == [("arithmetic", 0)] * 6 + [("arithmetic", 1)] * 6 + [(str(hard), 0)] * 2 + [(str(hard), 1)] * 2
    assert len({record["sample_id"] for record in records}) == 16
    accuracy = [record["correct"] for record in records if record["dataset"] == str(hard)]
    assert sum(accuracy) / len(accuracy) == done.json["datasets"][str(hard)]["accuracy"]
    worst = nemorl(
        "view", "samples", tmp_path / "answers", "--split", "evaluation", "--worst", 1, "--tokens", "--json"
    ).json
    assert len(worst[0]["sequences"][0]["generation_logprobs"]) == worst[0]["total_tokens"]

    done = nemorl("eval", config, "--output", tmp_path / "answers.csv")
    assert (done.code, "ends in .jsonl, or a folder" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to evaluate"),
        (["--model", "m"], "nothing to evaluate"),
        (["--model", "m", "--data", "arithmetik", "--environment", "math"], "Did you mean 'arithmetic'?"),
        (["--model", "m", "--data", "arithmetic"], "nothing scores the responses"),
        (["--model", "m", "--data", "arithmetic", "--environment", "mth"], "Did you mean 'math'?"),
    ],
)
def test_eval_of_nothing_says_what_is_missing(nemorl: Command, arguments: list[str], words: str) -> None:
    done = nemorl("eval", *arguments)
    assert done.code == 2
    assert words in done.err


def test_eval_of_an_unfinished_run_says_so(nemorl: Command, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")
    done = nemorl("eval", tmp_path / "run")
    assert done.code == 2
    assert "has no exported model yet" in done.err


@pytest.mark.parametrize("mode", ["--chat", "--raw"])
def test_generate_answers_every_prompt(nemorl: Command, trained: Path, mode: str) -> None:
    done = nemorl(
        "generate", "1+1=", "2+2=", "--model", trained / "model", mode, "--samples", 2, "--max-new-tokens", 3, "--json"
    )
    assert done.code == 0
    assert [(answer["prompt"], len(answer["responses"])) for answer in done.json] == [("1+1=", 2), ("2+2=", 2)]


@pytest.mark.slow
def test_generate_is_repeatable_and_readable(nemorl: Command, trained: Path) -> None:
    options = ["--model", trained / "model", "--temperature", 1, "--seed", 3, "--max-new-tokens", 5]
    first, second = (nemorl("generate", "1+1=", *options) for _ in range(2))
    assert first.code == 0
    assert first.out == second.out


def test_report_is_written_again(nemorl: Command, trained: Path, tmp_path: Path) -> None:
    done = nemorl("report", trained, "--output", tmp_path / "r.html")
    assert (done.code, done.out.strip()) == (0, str(tmp_path / "r.html"))
    assert (tmp_path / "r.html").stat().st_size > 1000


@pytest.mark.slow
def test_plugins_list_can_be_narrowed(nemorl: Command) -> None:
    listed = nemorl("plugins", "list", "--kind", "algorithms", "--json").json
    assert {entry["kind"] for entry in listed} == {"algorithms"}
    assert {"grpo", "sft"} <= {entry["name"] for entry in listed}
    assert "dtensor" in nemorl("plugins", "list").out


@pytest.mark.parametrize(
    "name", ["grpo", "dtensor", "hf", "math", "file", "tensorboard", "quickstart", "nemorl-sft:sft"]
)
@pytest.mark.slow
def test_plugins_show_explains_any_plugin(nemorl: Command, name: str) -> None:
    done = nemorl("plugins", "show", name)
    assert done.code == 0
    for details in nemorl("plugins", "show", name, "--json").json:  # an algorithm and a template may share a name
        assert details["status"] in ("ok", "missing")
        assert all(option["description"] for option in details["options"])


@pytest.mark.parametrize(("width", "has_summary"), [(200, True), (110, True), (72, False)])
def test_a_narrow_terminal_cuts_summaries_and_no_names(width: int, has_summary: bool) -> None:
    entry = {"kind": "environments", "name": "sliding_puzzle", "distribution": "nemorl-tasks"}
    facts = {"version": "0.1.0", "status": "ok", "venv": None, "summary": "slide tiles " * 20}
    with (console := RichConsole(width=width)).capture() as captured:
        console.print(listed([{**entry, **facts}], console.width))
    first, second = captured.get().rstrip().splitlines()
    assert all(text in second for text in ("environment", "sliding_puzzle", "nemorl-tasks", "0.1.0", "ok"))
    assert ("SUMMARY" in first) == ("slide tiles" in second) == has_summary
    assert len(second) <= width


@pytest.mark.parametrize("kind", ["training_backends", "training-backend", "Training Backend"])
def test_a_kind_may_be_named_as_people_do(nemorl: Command, kind: str) -> None:
    names = [entry["name"] for entry in nemorl("plugins", "list", "--kind", kind, "--json").json]
    assert "dtensor" in names
    assert "grpo" not in names


@pytest.mark.slow
def test_plugins_check_builds_and_tries_a_plugin_in_another_process(nemorl: Command) -> None:
    done = nemorl("plugins", "check", "math", "--json")
    (result,) = done.json
    assert (done.code, result["ok"], result["id"]) == (0, True, "nemorl-math-env:math")
    assert {"entry_point_is_usable", "any_response_gets_a_finite_score"} <= set(result["passed"])


@pytest.mark.slow
def test_doctor_knows_the_machine(nemorl: Command) -> None:
    done = nemorl("doctor")
    assert done.code in (0, 1)  # 1 where this machine has a problem
    for fact in ("python", "gpus", "disk_free_gib", "torch", "plugins"):
        assert fact in done.out


@pytest.mark.slow
def test_two_config_files_are_compared_once_defaults_are_filled_in(
    nemorl: Command, config: Path, tmp_path: Path
) -> None:
    assert nemorl("compare", config, config).out == "no difference\n"
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text() + "kl_penalty: 0.5\nseed: 42\n")  # 42 is the default seed
    done = nemorl("compare", config, other, "--json")
    assert (done.code, done.json) == (1, [{"path": "kl_penalty", "one": 0.01, "other": 0.5}])


def test_compare_names_every_path_that_holds_no_config(nemorl: Command, config: Path, tmp_path: Path) -> None:
    done = nemorl("compare", "configs", tmp_path / "none.yaml", tmp_path)
    assert done.code == 2
    assert f"there is no '{tmp_path}/none.yaml'; the folder '{tmp_path}' is no run: it has no config.yaml" in done.err


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 120, 200])
@pytest.mark.slow
def test_runs_breaks_no_name_at_any_width(
    nemorl: Command, trained: Path, tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["grpo-1a2b3c4d", "a-name-that-a-person-gave-2026-11-22", "reinforce_plus_plus_baseline-5e6f7a8b"]
    for name in names:
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in ("config.yaml", "metrics.jsonl", "events.jsonl"):
            shutil.copy(trained / file, tmp_path / "runs" / name)
    monkeypatch.setattr(terminal, "PIPE_COLUMNS", columns)
    lines = nemorl("runs", tmp_path / "runs").out.splitlines()
    for name in names:
        (line,) = (line for line in lines if name in line)
        assert line.startswith(name)
        assert line == name or "finished" in line
    assert all(len(line) <= columns or line in names for line in lines)


@pytest.mark.slow
def test_config_docs_explains_a_section_and_guesses_a_misspelt_one(nemorl: Command) -> None:
    options = {option["name"]: option for option in nemorl("config", "docs", "policy.optimizer", "--json").json}
    assert options["lr"]["default"] == 1e-6
    assert options["lr"]["description"].startswith("Peak learning rate.")
    wrong = nemorl("config", "docs", "policy.optimzer")
    assert wrong.code == 2
    assert "Did you mean 'policy.optimizer'?" in wrong.err


@pytest.mark.slow
def test_runs_lists_runs_newest_first(nemorl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, time, reward in (("old", 100.0, 0.25), ("new", 200.0, 0.5)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("algorithm: grpo\nmodel: tiny\nmax_steps: 4\n")
        record = {"step": 2, "time": time, "train/reward": reward}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "runs" / "not-a-run").mkdir()
    listed = nemorl("runs", tmp_path / "runs", "--json").json
    assert [(run["name"], run["step"], run["max_steps"], run["reward"], run["status"]) for run in listed] == [
        ("new", 2, 4, 0.5, "incomplete"),
        ("old", 2, 4, 0.25, "incomplete"),
    ]
    gone = replace(Owner.me(), boot_id="of an earlier boot")
    (tmp_path / "runs/old/run.lock").write_text(json.dumps(asdict(gone)))
    listed = nemorl("runs", tmp_path / "runs", "--json").json
    assert [run["status"] for run in listed] == ["incomplete", "lost"]
    assert "new" in nemorl("runs", tmp_path / "runs").out
    assert "no folder" in nemorl("runs", tmp_path / "gone").err
    assert nemorl("runs", "list", tmp_path / "runs", "--json").json == listed
    monkeypatch.chdir(tmp_path)
    assert nemorl("runs", "--json").json == nemorl("runs", "list", "--json").json == listed
    assert nemorl("runs", "--help").code == 0
    assert nemorl("runs", "verify").code == 0
    (tmp_path / "runs/old/config.yaml").write_text("[]")
    assert nemorl("runs", "verify").code == 1


@pytest.mark.slow
def test_export_writes_a_checkpoint_as_a_model_folder(nemorl: Command, config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    nemorl("train", config, "--run-dir", run_dir, "max_steps=2", "checkpoint.every=1", "--json")
    done = nemorl("export", run_dir, tmp_path / "last", "--json")
    assert done.json["step"] == 2
    exported = (tmp_path / "last" / "model.safetensors").read_bytes()
    assert exported == (run_dir / "model" / "model.safetensors").read_bytes()
    assert nemorl("export", run_dir, tmp_path / "first", "--step", "1", "--json").json["step"] == 1
    assert (tmp_path / "first" / "config.json").is_file()
    assert "there are 1, 2" in nemorl("export", run_dir, tmp_path / "third", "--step", "3").err
    assert "exists" in nemorl("export", run_dir, tmp_path / "last").err
    assert "not a run directory" in nemorl("export", tmp_path, tmp_path / "other").err


@pytest.mark.slow
def test_export_writes_an_adapter_that_peft_reads(nemorl: Command, trained: Path, tmp_path: Path) -> None:
    policy = {"max_sequence_tokens": 32, "lora": {"rank": 2}, "optimizer": {"lr": 1e-2}}
    config = tmp_path / "lora.yaml"
    quick = {"validation": {"every": 0, "at_end": False}, "checkpoint": {"every": 1, "export": False}}
    config.write_text(yaml.safe_dump(settings(trained / "model", policy=policy, **quick)))
    assert nemorl("train", config, "--run-dir", tmp_path / "run", "--json").code == 0
    done = nemorl("export", tmp_path / "run", "--adapter", tmp_path / "adapter", "--json")
    assert (done.code, done.json["step"], done.json["adapter"]) == (0, 1, str(tmp_path / "adapter"))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    refused = nemorl("export", trained, tmp_path / "none", "--adapter")
    assert (refused.code, "has no LoRA adapter" in refused.err) == (2, True)


@pytest.mark.slow
def test_config_templates_are_listed_printed_and_written(nemorl: Command, tmp_path: Path) -> None:
    listed = {entry["name"]: entry for entry in nemorl("config", "templates", "--json").json}
    assert listed["grpo"]["summary"].startswith("GRPO on your own questions and answers")
    printed = nemorl("config", "templates", "grpo").out
    assert "algorithm: grpo\n" in printed
    path = tmp_path / "mine.yaml"
    nemorl("config", "templates", "grpo", "--output", path)
    assert path.read_text() == printed
    again = nemorl("config", "templates", "grpo", "--output", path)
    assert (again.code, "exists" in again.err) == (2, True)
    assert "Did you mean 'grpo'?" in nemorl("config", "templates", "gpro").err


@pytest.mark.slow
def test_config_templates_are_found_by_what_one_wants(nemorl: Command) -> None:
    told = nemorl("config", "templates", "--for", "8 GPUs, math, Qwen3-8B, tea").out
    assert told.startswith("grpo_8gpu: GRPO on competition mathematics")
    assert "    fits: 8 GPUs, 8B, math (task)\n    not: tea\n" in told
    assert "no template says anything of tea\n" in told
    found = nemorl("config", "templates", "--for", "8 GPUs, math, Qwen3-8B", "--json").json
    assert (found[0]["name"], found[0]["hardware"], found[0]["lacks"]) == ("grpo_8gpu", ["8 GPUs"], [])
    nothing = nemorl("config", "templates", "--for", "tea").out
    assert nothing.startswith("no template says anything of 'tea'; all of them:\nTASK ")
    assert "drop one" in nemorl("config", "templates", "grpo", "--for", "math").err


@pytest.mark.slow
def test_config_validate_says_ok(nemorl: Command, config: Path) -> None:
    assert nemorl("config", "validate", config).out == f"{config}: ok (grpo)\n"
    assert nemorl("config", "validate", config, "--json").json == {"valid": True, "problems": []}


@pytest.mark.slow
def test_config_validate_for_other_machines(nemorl: Command, config: Path) -> None:
    asked = [config, "cluster.gpus_per_node=8"]
    assert "this machine has" in nemorl("config", "validate", *asked).err
    assert nemorl("config", "validate", *asked, "--for-cluster").code == 0


@pytest.mark.slow
def test_config_show_is_the_resolved_config(nemorl: Command, config: Path) -> None:
    shown = yaml.safe_load(nemorl("config", "show", config, "seed=7").out)
    assert (shown["seed"], shown["policy"]["precision"]) == (7, "float32")
    assert nemorl("config", "show", config, "--json").json["seed"] == 42


@pytest.mark.slow
def test_config_schema_is_printed_or_written(nemorl: Command, tmp_path: Path) -> None:
    printed = nemorl("config", "schema", "sft").json
    assert "batch_size" in printed["properties"]
    assert nemorl("config", "schema", "sft", "--output", tmp_path / "s.json").code == 0
    assert json.loads((tmp_path / "s.json").read_text()) == printed


@pytest.mark.slow
def test_commands_of_plugins_are_part_of_the_tree(nemorl: Command) -> None:
    done = nemorl("quickstart", "--help")
    assert done.code == 0
    assert "nemorl quickstart" in done.out


@pytest.mark.slow
def test_the_quickstart_refuses_an_override_before_its_first_stage(nemorl: Command, tmp_path: Path) -> None:
    done = nemorl("quickstart", "policy.optimizer.lr=-1", "--run-dir", tmp_path / "first")
    assert done.code != 0
    assert "policy.optimizer.lr" in done.err
    assert not (tmp_path / "first" / "sft").exists()


@pytest.mark.slow
def test_a_library_that_wraps_sys_exit_makes_no_failure_of_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = sys.exit

    def noted(code: object = None) -> None:  # as wandb does, to tell its service how the process ended
        leave(code)

    monkeypatch.setattr(sys, "exit", noted)
    monkeypatch.setattr(sys, "argv", ["nemorl", "plugins", "list", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("place", "code"), [("train", 2), ("train/deep/file", 2), ("training.log", 1), ("option", 2), (None, 1)]
)
def test_an_error_of_the_disk_is_the_user_s_where_the_command_line_names_the_place(
    place: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(13, "Permission denied", *([] if place is None else [str(tmp_path / place)]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tree, "_plugin_commands", fail)
    assert tree._run(["train", "--file=option"], debug=False) == code
