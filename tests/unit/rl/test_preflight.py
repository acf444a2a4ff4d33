"""What would end a run after minutes of loading is said before anything loads."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from nemorl.base.files.atomic import folder_refusal
from nemorl.config.load import validate
from nemorl.config.models import GenerationConfig
from nemorl.config.run import RunConfig
from nemorl.contracts.environment import Environment
from nemorl.errors import ConfigError, ForeignError, UsageError
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.plugins.registry import registry
from nemorl.resources.preflight import launch_problems
from nemorl.types import Prompt
from nemorl_cli.console import HEARTBEAT_S, Console
from nemorl_rl.audit.mismatch import measure_mismatch
from nemorl_rl.data.rows import RowDataModule
from nemorl_rl.environments import RewardFunction, WeightedEnvironment
from nemorl_rl.evaluation.evaluation import Evaluator
from nemorl_rl.evaluation.generating import respond
from nemorl_rl.models.hub_models import absent_models, require_model
from nemorl_rl.rollouts.rehearsal import rehearse, reward_problems
from recorded_messages import Raises

ROW = {"prompt": "1+1=", "answer": "2", "level": 3}


def config(model: str) -> RunConfig:
    return validate(
        registry().load("algorithms", "grpo"), {"model": model, "data": "arithmetic", "environment": "math"}
    )


def test_a_model_that_only_an_option_of_other_software_names_need_not_be_here(tiny_model: Path) -> None:
    judge = {"name": "judge", "url": "https://node7/v1", "model": "served", "options": {"judge_model": "gpt-4.1-mini"}}
    given = {"model": str(tiny_model), "data": "arithmetic", "environment": judge}
    assert not list(absent_models(validate(registry().load("algorithms", "grpo"), given)))


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The checks of a run whose model and directory are fine, with this reward; returns the warnings."""

    def check(reward: Any, row: dict[str, Any] | None = None) -> list[str]:
        warnings: list[str] = []
        environment = reward if isinstance(reward, Environment) else RewardFunction(reward)
        found = [
            *launch_problems(config(str(tiny_model)), tmp_path / "runs/r", warnings.append),
            *reward_problems(environment, row or ROW),
        ]
        if found:
            raise ConfigError(found)
        rehearse(environment, row or ROW, warnings.append)
        assert not (tmp_path / "runs").exists(), "looking leaves nothing behind"
        return warnings

    return check


# The model


def only_problem(model: str) -> tuple[str, str]:
    (problem,) = absent_models(config(model))
    assert problem.path == "model"
    return problem.message, problem.fix or ""


def test_a_model_that_is_nowhere_is_named_without_the_network() -> None:
    message, fix = only_problem("models/nope")
    assert "there is no folder 'models/nope', it is not in the cache" in message
    assert "HF_HUB_OFFLINE is set" in message
    assert "config.json" in fix


@pytest.mark.parametrize("name", ["org/a--b", "org/a..b", "org/a.git", "x" * 120, "x" * 300])
def test_a_name_that_the_hub_does_not_allow_is_refused_like_one_that_is_nowhere(name: str, raises: Raises) -> None:
    with raises(ConfigError, "hub", path="model"):
        require_model(name)


def test_all_that_loads_a_model_refuses_one_that_is_nowhere_before_it_tries_to_download(raises: Raises) -> None:
    nowhere = config("models/nope")
    for load in (
        lambda: respond("models/nope", ["1+1="], generation=GenerationConfig()),
        lambda: Evaluator(nowhere),
        lambda: measure_mismatch(nowhere),
    ):
        with raises(ConfigError, 1, path="model"):
            load()


def test_the_closest_folder_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/qwen-small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert only_problem("models/qwen-smal")[1] == "Did you mean 'models/qwen-small'?"


def test_a_model_in_the_cache_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "models--org--name"  # laid out as huggingface_hub does
    (repo / "snapshots/abc").mkdir(parents=True)
    (repo / "snapshots/abc/config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert list(absent_models(config("org/name"))) == []
    assert len(list(absent_models(config("org/other")))) == 1


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for models that are not there, or not for everyone."""

    def do_GET(self) -> None:
        code = {"secret": "GatedRepo", "busy": ""}.get(self.path.rpartition("/")[2], "RepoNotFound")
        self.send_response({"GatedRepo": 403, "": 503}.get(code, 404))
        self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # so often it looks for its end
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_the_answer_of_the_hub_is_passed_on() -> None:
    assert "the hub knows no such model" in only_problem("org/nope")[0]
    assert "asks for permission" in only_problem("org/secret")[0]
    assert list(absent_models(config("org/busy"))) == []  # its own trouble says nothing about the model


def test_a_hub_that_is_not_there_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens on "discard"
    assert "http://127.0.0.1:9 cannot be reached" in only_problem("org/nope")[0]


# The directory


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'} is a file" in str(folder_refusal(tmp_path / "file/runs/r"))
    # A file system in which nobody makes files.
    assert "/proc/runs cannot be written" in str(folder_refusal(Path("/proc/runs")))
    refusal = str(folder_refusal(tmp_path / ("x" * 5000)))
    assert "File name too long" in refusal
    assert len(refusal) < 200
    assert folder_refusal(tmp_path / "not/there/yet") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in str(folder_refusal(tmp_path / "r"))


def test_a_list_of_plugins_that_names_what_is_not_here_is_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"model": str(tiny_model), "plugins": {"block": ["acme-spyware", "nemorl-insight"]}}
    warnings: list[str] = []
    assert not list(validate(RunConfig, settings).dry_run(tmp_path / "r", warnings.append))
    assert warnings == ["plugins.allow or block names 'acme-spyware', which is not installed here"]


# The reward


def test_a_parameter_that_is_no_column_is_refused(run: Callable[..., list[str]]) -> None:
    with pytest.raises(ConfigError) as refused:
        run(lambda prompt, response, levle: 1.0)
    (problem,) = refused.value.problems
    assert "asks for levle; the rows have prompt, answer, level" in problem.message
    assert problem.fix == "Did you mean 'level'?"


def test_parameters_that_columns_or_defaults_fill_are_fine(run: Callable[..., list[str]]) -> None:
    assert run(lambda prompt, response, level, answer, other=1: float(level == 3 and answer == "2")) == []
    assert run(lambda prompt, response, **columns: float(columns["level"])) == []
    assert run(lambda prompt, response, answer: 1.0, {"prompt": "1+1="}) == []  # rows without an answer give None


@pytest.mark.parametrize(
    ("reward", "error", "fact"),
    [
        (lambda prompt, response: unknown_name, ForeignError, "NameError"),  # type: ignore[name-defined]  # noqa: F821
        (lambda prompt, response, level: level.strip(), ForeignError, "AttributeError"),
        (lambda prompt, response, **row: row["gold"], ForeignError, "'gold'"),
        (lambda prompt, response: None, UsageError, None),
        (lambda prompt, response: "1", UsageError, "'1'"),
    ],
)
def test_a_reward_that_fails_on_the_first_row_is_refused(
    run: Callable[..., list[str]], reward: Any, error: type[Exception], fact: object, raises: Raises
) -> None:
    with raises(error, fact, varies=r"\S+, line \d+" if error is ForeignError else None) as refused:
        run(reward)
    if error is ForeignError:
        assert refused.value.__cause__ is not None, "--debug shows the author's own traceback"


def test_a_batched_reward_is_tried_with_a_batch_of_one_and_keeps_nothing_of_it(
    run: Callable[..., list[str]], raises: Raises
) -> None:
    batches = []

    def grade(prompts: list[str], responses: list[str], level: list[int]) -> list[float]:
        batches.append((prompts, responses, level))
        return [1.0] * len(responses)

    assert run(grade) == []
    assert batches == [(["1+1="], ["2"], [3])]
    with raises(UsageError, 1):
        run(RewardFunction(lambda prompts, responses: 1.0, batched=True))
    reward = RewardFunction(grade)
    run(reward)
    assert scored_together(reward) == [1.0, 1.0]
    assert batches[-1] == (["a", "b"], ["1", "2"], [None, None])  # and not the trial's besides


def scored_together(reward: RewardFunction) -> list[float]:
    async def both() -> list[float]:
        asks = [reward.score(Prompt(n, text, (), row={"level": None}), str(n + 1)) for n, text in enumerate("ab")]
        return [score.reward for score in await asyncio.gather(*asks)]  # type: ignore[arg-type, union-attr]

    return asyncio.run(both())


def test_what_may_be_the_fault_of_the_response_is_a_warning(run: Callable[..., list[str]]) -> None:
    (warning,) = run(lambda prompt, response: float(response + "x"))
    assert "raised ValueError" in warning
    assert "the response '2'" in warning


def test_only_rewards_without_side_effects_are_tried(run: Callable[..., list[str]]) -> None:
    calls = []

    class Paid(Environment):
        def score(self, prompt: Prompt, response: str) -> float:
            calls.append(response)
            return 1.0

    async def judge(prompt: str, response: str) -> float:
        calls.append(response)
        return 1.0

    def free(prompt: str, response: str) -> float:
        calls.append(f"free {response}")
        return 1.0

    assert run(Paid()) == run(judge) == []
    assert calls == []
    run(WeightedEnvironment({"paid": Paid(), "free": free}))
    assert calls == ["free 2"]


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reward = RewardFunction(lambda prompt, response, gold: 1.0)
    trainer = validate(type(config("x")), {"model": "models/nope", "run_dir": str(tmp_path / "r")}).build()
    trainer.data, trainer.environment = RowDataModule([ROW], 1, seed=0), reward
    trainer.directory = SimpleNamespace(path=tmp_path / "file/r", warn=print)
    assert [problem.path for problem in trainer.preflight()] == ["run_dir", "model", "reward_fn"]


def test_fit_checks_before_it_loads_the_model(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    settings = {"model": str(tiny_model), "policy": {"init": "random"}, "run_dir": str(tmp_path / "r")}
    trainer = validate(registry().load("algorithms", "grpo"), settings).build()
    with raises(ConfigError, "gold", path="reward_fn"):
        trainer.fit([ROW], lambda prompt, response, gold: 1.0, console=Console(quiet=True))
    # Nothing but the event is left: the directory counts as a run once config.yaml is in it.
    assert not (tmp_path / "r/config.yaml").exists()
    assert '"event": "failed"' in (tmp_path / "r/events.jsonl").read_text()


def test_an_environment_that_a_run_builds_is_closed_also_where_it_ends_before_anything_loads(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    closed = []

    class Serving(Environment):
        needs_columns = frozenset({"gold"})

        def close(self) -> None:
            closed.append(self)

    class ServingConfig(EnvironmentConfig):
        """Options of it."""

        def build(self) -> Environment:
            return Serving()

    settings = {"model": str(tiny_model), "policy": {"init": "random"}, "run_dir": str(tmp_path / "r")}
    trainer = validate(registry().load("algorithms", "grpo"), settings).build()
    for given, count in ((ServingConfig(), 1), (Serving(), 1)):  # what the caller made is the caller's until it is used
        with raises(ConfigError, "gold", path="data"):
            trainer.fit([ROW], given, console=Console(quiet=True))
        assert len(closed) == count


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["train", "dry run"])
@pytest.mark.slow
def test_the_command_says_it_before_torch_is_imported(dry: list[str], tmp_path: Path) -> None:
    (path := tmp_path / "c.yaml").write_text(
        "{algorithm: grpo, model: models/nope, data: arithmetic, environment: math}"
    )
    code = "import sys\nfrom nemorl_cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(path), *dry], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == "False\n"
    first, *_, last = done.stderr.splitlines()
    assert first == f"reading {path} …"
    assert "Traceback" not in done.stderr
    assert "there is no folder 'models/nope'" in done.stderr
    assert last.strip().startswith("fix:")


# Signs of life


def test_the_display_beats_after_ten_silent_seconds() -> None:
    now, file = [0.0], io.StringIO()
    console = Console(file=file, live=False, clock=lambda: now[0])
    console.announce("loading the model org/name")
    for second in range(1, 25):
        now[0] = second
        console.beat()
    assert file.getvalue().splitlines() == [
        "loading the model org/name …",
        "… loading the model org/name (0:10)",
        "… loading the model org/name (0:20)",
    ]
    console.start("r", 5)
    console.phase("policy_training")
    now[0] += HEARTBEAT_S
    console.beat()
    assert file.getvalue().splitlines()[-1] == "… step 1, policy training (0:10)"


def test_nothing_beats_where_nothing_is_to_be_shown() -> None:
    for options in ({"quiet": True}, {"live": False}):
        now, file = [0.0], io.StringIO()
        console = Console(file=file, clock=lambda now=now: now[0], **options)  # type: ignore[arg-type, misc]
        now[0] = 100.0
        if options.get("quiet"):
            console.announce("loading")
            now[0] = 200.0
        else:
            console.phase("")
        console.beat()
        assert file.getvalue() == ""
