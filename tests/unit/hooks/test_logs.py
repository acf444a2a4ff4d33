"""Structured logs: ids of run, step and episode in all threads and tasks, levels, no secrets; in a real short run."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.base.process.logs import Carried, RunHandler, carried, entered, installed, log_ids
from nemorl.contracts.environment import Environment
from nemorl.errors import ConfigError
from nemorl.types import Prompt, Score
from nemorl_cli.console import Console
from nemorl_rl.environments.pool import EnvironmentPool
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]
log = logging.getLogger("nemorl_test")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    with installed(RunHandler(stream, logging.INFO, "json", {"run": "r1"})):
        yield stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_object_with_the_ids_around_it(written: io.StringIO) -> None:
    with log_ids(episode=3), log_ids(worker="w"):
        log.warning("two\nlines %s", "x")
    log.info("after")
    first, second = lines(written)
    assert (first["message"], first["level"], first["logger"]) == ("two\nlines x", "warning", "nemorl_test")
    assert (first["run"], first["episode"], first["worker"]) == ("r1", 3, "w")
    assert (second["run"], "episode" in second) == ("r1", False)


def test_levels_and_traces(written: io.StringIO) -> None:
    log.debug("below the level")
    logging.getLogger("another.library").info("its own business")
    logging.getLogger("another.library").warning("heed this")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    found = lines(written)
    assert [line["message"] for line in found] == ["heed this", "failed"]
    assert "ValueError: why" in found[1]["trace"]


def test_what_the_console_says_by_itself_goes_to_the_file_alone(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler = RunHandler(stream, logging.INFO, "json", {"run": "r1"})
    record = log.makeRecord(log.name, logging.WARNING, __file__, 0, "alert: kl_high", (), None)
    with installed(handler):
        handler.write(record)
    assert lines(stream)[0]["message"] == "alert: kl_high"
    assert capsys.readouterr().err == ""


def test_secrets_are_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "verysecretvalue")
    monkeypatch.setenv("ACME_MODE", "online-mode")
    stream = io.StringIO()
    with installed(RunHandler(stream, logging.INFO, "json", {})):
        log.info("key %s in %s", "verysecretvalue", "online-mode")
        log.info("Authorization: Bearer abcdef123 for http://me:passw0rd@host/x?y=1")
    text = stream.getvalue()
    for secret in ("verysecretvalue", "abcdef123", "passw0rd"):
        assert secret not in text
    assert "key <ACME_API_KEY> in online-mode" in text
    assert "Bearer <token> for http://me:<password>@host/x?y=1" in text


def test_what_is_carried_makes_another_process_log_alike(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    with log_ids(episode=4):
        sent = carried(worker="training", rank=1)
    assert sent == Carried(logging.INFO, "json", {"run": "r1", "episode": 4, "worker": "training", "rank": 1})
    with entered(sent):  # there is a handler already: it is not doubled
        log.info("from the worker")
    (line,) = lines(written)
    assert (line["worker"], line["rank"], line["episode"]) == ("training", 1, 4)


def test_nothing_is_carried_where_no_run_logs() -> None:
    assert carried(worker="training") is None
    with entered(None):
        pass


class Noisy(Environment):
    """Logs in each call."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)

    def score(self, prompt: Prompt, response: str) -> Score:
        self.barrier.wait()  # both episodes are in their threads at the same time
        log.info("scoring %s", response)
        return Score(1.0)


class NoisyAsync(Environment):
    """The same, as a coroutine."""

    async def score(self, prompt: Prompt, response: str) -> Score:
        log.info("scoring %s", response)
        return Score(1.0)


@pytest.mark.parametrize("environment", [Noisy, NoisyAsync])
def test_episodes_keep_their_ids_in_threads_and_tasks(written: io.StringIO, environment: Any) -> None:
    pool = EnvironmentPool(environment(), concurrency=2)
    try:
        for _ in range(2):
            episodes = [pool.start(Prompt(0, "1+1=", ())) for _ in range(2)]
            pool.step(episodes, ["a", "b"])
    finally:
        pool.close()
    found = sorted((line["episode"], line["message"], line["run"]) for line in lines(written))
    said = ["scoring a", "scoring b", "scoring a", "scoring b"]
    assert found == [(number, message, "r1") for number, message in enumerate(said)]


def run(model: Path, run_dir: Path, **options: Any) -> None:
    config = nemorl.load_config(
        {
            "algorithm": "sft",
            "model": str(model),
            "run_dir": str(run_dir),
            "batch_size": 2,
            "max_steps": 2,
            "validation": {"every": 0},
            "checkpoint": {"every": 0, "export": False},
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "plugins": {"hooks": [{"name": "logs", **options}]},
        }
    )
    config.build().fit(ROWS, val_dataset=ROWS, console=Console(quiet=True))


def test_a_run_writes_its_steps_and_events(tiny_model: Path, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "run")
    found = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {line["run"] for line in found} == {"run"}
    told = [(line.get("step"), line["message"].partition(":")[0]) for line in found]
    assert (1, "step 1") in told
    assert [name for _, name in told][-2:] == ["checkpoint", "finished"]
    assert logging.getLogger().handlers == [h for h in logging.getLogger().handlers if not isinstance(h, RunHandler)]


def test_text_is_for_people(tiny_model: Path, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "run", format="text", file="run.log")
    text = (tmp_path / "run" / "run.log").read_text()
    assert " INFO nemorl_insight.hooks.logs [run=run step=2] step 2: loss " in text


@pytest.mark.parametrize("file", ["metrics.jsonl", "../log", ""])
def test_the_file_is_one_of_the_runs_own(tiny_model: Path, tmp_path: Path, raises: Raises, file: str) -> None:
    with raises(ConfigError):
        run(tiny_model, tmp_path / "run", file=file)
