"""Code of others that takes too long in the main thread is interrupted, and the error says whose it is."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import nemorl
import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.process.deadlines import deadline
from nemorl.config.run import PluginsConfig
from nemorl.errors import DeadlineError, ForeignError, boundary
from nemorl.plugins import Index, Registry
from nemorl.plugins.hooks import Hooks
from nemorl_cli.console import Console
from recorded_messages import Raises
from zoo import importing

FOREVER_S = 600.0


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_what_sleeps_is_woken_and_named(raises: Raises) -> None:
    limit = deadline("the hook", 0.05, setting="plugins.hook_timeout_s")
    with raises(DeadlineError, "0.05", "test_deadlines.py", "plugins.hook_timeout_s"), boundary("someone else"), limit:
        time.sleep(FOREVER_S)


def test_what_loops_and_swallows_exceptions_is_ended() -> None:
    def loops() -> None:
        while True:
            try:
                with boundary("inner code"):
                    sum(range(1000))
            except Exception:
                continue

    with pytest.raises(DeadlineError), deadline("the loop", 0.05):
        loops()


def test_what_is_in_time_and_what_fails_by_itself_is_left_alone() -> None:
    with deadline("a", FOREVER_S):
        pass
    with pytest.raises(KeyError), deadline("a", FOREVER_S):
        raise KeyError("its own")


def test_code_without_a_module_of_its_own_is_interrupted_too(raises: Raises) -> None:
    loop = compile("while True: pass", "generated", "exec")
    with raises(DeadlineError, "generated"), deadline("generated code", 0.05):
        exec(loop, {"__name__": None})


def test_an_outer_deadline_goes_on_after_an_inner_one(raises: Raises) -> None:
    def inner() -> None:
        with raises(DeadlineError, "inner"), deadline("inner", 0.05):
            time.sleep(FOREVER_S)
        with deadline("another", FOREVER_S):
            pass
        time.sleep(FOREVER_S)

    with raises(DeadlineError, "outer"), deadline("outer", 0.2):
        inner()


def test_an_alarm_while_the_deadline_is_set_or_lifted_reaches_nobody_as_it_is() -> None:
    for _ in range(50):
        with pytest.raises(DeadlineError), deadline("set", 1e-6):
            time.sleep(FOREVER_S)
    for turn in range(600):
        until = time.perf_counter() + 0.0003 + turn % 10 * 1e-5
        with contextlib.suppress(DeadlineError), deadline("lifted", 0.0004):
            while time.perf_counter() < until:
                pass


def test_other_threads_have_no_deadline() -> None:
    ended: list[bool] = []

    def work() -> None:
        with deadline("a thread", 0.01):
            time.sleep(0.05)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


@pytest.mark.slow
def test_what_traces_the_block_is_not_interrupted() -> None:
    """Coverage holds a lock while it takes note of a file: an error in there would leave it locked for ever."""
    tracer: dict[str, Any] = {"__name__": "slow_tracer.inside", "time": time, "entered": 0, "left": 0}
    exec(
        dedent("""
            def trace(frame, event, arg):
                global entered, left
                entered += 1
                time.sleep(0.05)
                left += 1
        """),
        tracer,
    )
    before = sys.gettrace()

    def traced() -> None:
        sys.settrace(tracer["trace"])
        try:
            while True:
                len_of(())
        finally:
            sys.settrace(before)

    def len_of(items: tuple[()]) -> int:
        return len(items)

    with pytest.raises(DeadlineError), deadline("a traced block", 0.12):
        traced()
    assert tracer["entered"] >= 2
    assert tracer["entered"] == tracer["left"]


def test_a_hook_that_hangs_is_disabled_and_the_next_one_is_called() -> None:
    class Hangs:
        def on_step_begin(self) -> None:
            time.sleep(FOREVER_S)

    class Counts:
        steps = 0

        def on_step_begin(self) -> None:
            self.steps += 1

    reports: list[str] = []
    hooks, counts = Hooks(reports.append, limit_s=0.05), Counts()
    hooks.register(counts, "counts")
    hooks.register(Hangs(), "hangs")
    for step in (1, 2):
        hooks.fire("on_step_begin", trainer=None, step=step)
    (report,) = reports
    assert report.startswith("hook on_step_begin of hangs: hook on_step_begin of hangs took more than 0.05 s")
    assert report.endswith("it is disabled for the rest of this run")
    assert counts.steps == 2


def test_a_plugin_that_hangs_while_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    importing("acme-asleep", "", f"import time; time.sleep({FOREVER_S})").install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = PluginsConfig(import_timeout_s=0.2).policy()
    with raises(DeadlineError, "asleep", "acme-asleep", "0.2", "acme_asleep.py", "plugins.import_timeout_s"):
        Registry(Index.installed().narrowed(policy)).load("environments", "asleep")
    sys.modules.pop("acme_asleep", None)


@pytest.mark.parametrize("place", ["build", "close"])
def test_a_part_that_hangs_while_it_is_built_or_closed_ends_the_run_with_an_event(
    place: str, tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    class Rows(list[Any]):
        def __len__(self) -> int:
            if place == "build":
                time.sleep(FOREVER_S)
            return super().__len__()

    class Sticky(nemorl.Environment):
        def score(self, prompt: Any, response: str) -> float:
            return float(len(response))

        def close(self) -> None:
            if place == "close":
                time.sleep(FOREVER_S)

    config = nemorl.load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "run_dir": str(tmp_path / "run"),
            "max_steps": 1,
            "num_prompts_per_step": 1,
            "num_generations_per_prompt": 2,
            "policy": {"init": "random", "max_sequence_tokens": 16},
            "generation": {"max_new_tokens": 2},
            "plugins": {"build_timeout_s": 3.0 if place == "close" else 0.5},
            "cluster": {"worker_timeout_s": 300},
        }
    )
    with raises((DeadlineError, ForeignError)):
        config.build().fit(Rows([{"prompt": "1+1="}]), Sticky(), console=Console(quiet=True))
    last = list(read_jsonl(tmp_path / "run" / "events.jsonl"))[-1]
    assert last["event"] == "failed"
    assert "took more than" in last["error"]
