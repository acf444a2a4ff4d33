"""The console: what it prints without a terminal, that it can be quiet, and that it gives a terminal back."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from nemorl_cli.console import Console, clock_time, sparkline

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plain(clock: Clock) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, clock=clock), out


def test_without_a_terminal_steps_are_plain_lines_every_two_seconds(clock: Clock) -> None:
    console, out = plain(clock)
    console.start("run", 100)
    for step in range(1, 11):
        clock.now += 0.5
        console.step(step, {"train/reward": step / 10})
    console.close()
    # Steps end at 0.5 s, 1.0 s, …; the first is printed, then the one 2 s later, then the next.
    printed = [line.split("  ")[0] for line in out.getvalue().splitlines()[1:]]
    assert printed == ["step 1/100", "step 5/100", "step 9/100"]
    assert "\x1b" not in out.getvalue()


def test_validation_and_the_last_step_are_always_printed(clock: Clock) -> None:
    console, out = plain(clock)
    console.start("run", 4)
    console.step(1, {"train/reward": 0.1})
    console.step(2, {"train/reward": 0.2})
    console.step(2, {"validation/accuracy": 0.25})
    console.step(4, {"train/reward": 0.4})
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["run, 4 steps", "step 1/4", "step 2/4", "step 4/4"]
    assert "accuracy 0.250" in lines[2]


def test_a_plain_line_holds_the_headline_numbers_and_the_time_left(clock: Clock) -> None:
    console, out = plain(clock)
    console.start("run", 3)
    clock.now += 10
    console.step(1, {"train/reward": 0.5, "train/loss": 0.01, "performance/tokens_per_sec": 1234.5, "train/lr": 1.0})
    # One step took 10 s, two are left.
    expected = "step 1/3  reward 0.500  loss 0.0100  tokens/s 1,234  elapsed 0:10  left 0:20"
    assert out.getvalue().splitlines()[1] == expected


def test_a_resumed_run_judges_the_time_left_by_its_own_steps(clock: Clock) -> None:
    console, out = plain(clock)
    console.start("run", 53)
    clock.now += 10
    console.step(51, {"train/reward": 0.5})
    assert "left 0:20" in out.getvalue()


def test_quiet_prints_nothing(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    with Console(quiet=True, live=True, clock=clock) as console:
        console.stage("GRPO")
        console.start("run", 2)
        console.phase("generation")
        console.message("hello")
        console.step(1, {"validation/accuracy": 0.5})
    assert capfd.readouterr() == ("", "")


def test_everything_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with Console() as console:
        console.start("run", 1)
        console.message("[bold]not markup[/bold]")
        console.step(1, {"train/reward": 0.5})
    out, err = capfd.readouterr()
    assert out == ""
    assert "[bold]not markup[/bold]" in err


def test_force_color_in_ci_does_not_turn_the_live_panel_on(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console, out = plain(clock)
    console.start("run", 1)
    assert HIDE_CURSOR not in out.getvalue()


def test_the_panel_shows_stage_numbers_phase_and_progress(clock: Clock) -> None:
    out = io.StringIO()
    console = Console(file=out, live=True, clock=clock)
    console.stage("SFT warm-up")
    console.start("quickstart", 4)
    console.phase("generation")
    console.step(1, {"train/reward": 0.25, "validation/accuracy": 0.5})
    console.step(2, {"train/reward": 0.75, "validation/accuracy": 0.4})
    with console._rich.capture() as capture:
        console._rich.print(console._render())
    frame = capture.get()
    for expected in ("SFT warm-up", "quickstart", "2/4", "0.750", "(best 0.500)", "generation"):
        assert expected in frame
    console.close()


def test_a_reward_that_is_no_number_stops_no_panel(clock: Clock) -> None:
    console = Console(file=io.StringIO(), live=True, clock=clock)
    console.start("run", 3)
    for step, reward in enumerate((0.25, float("nan"), float("inf")), start=1):
        console.step(step, {"train/reward": reward})
    with console._rich.capture() as capture:
        console._rich.print(console._render())
    assert "3/3" in capture.get()
    console.close()


def test_accuracies_of_two_sets_are_shown_one_by_one_and_of_many_as_their_mean(clock: Clock) -> None:
    console, out = plain(clock)
    console.start("run", 1)
    console.step(1, {"validation/eyes/accuracy": 1.0, "validation/blank/accuracy": 0.25, "validation/accuracy": 0.625})
    many = {f"validation/{name}/accuracy": 0.5 for name in "abcd"}
    console.step(1, {**many, "validation/accuracy": 0.5})
    assert "accuracy eyes 1.000, blank 0.250  " in out.getvalue().splitlines()[1]
    assert "accuracy 0.500  " in out.getvalue().splitlines()[2]


def test_the_cursor_comes_back_when_the_run_raises(clock: Clock) -> None:
    out = io.StringIO()

    def run() -> None:
        with Console(file=out, live=True, clock=clock) as console:
            console.start("run", 2)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()
    assert HIDE_CURSOR in out.getvalue()
    assert out.getvalue().rindex(SHOW_CURSOR) > out.getvalue().rindex(HIDE_CURSOR)


def test_the_cursor_comes_back_even_when_nobody_closes_the_console() -> None:
    code = "from nemorl_cli.console import Console; c = Console(live=True); c.start('run', 2); raise SystemExit(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.rindex(SHOW_CURSOR) > done.stderr.rindex(HIDE_CURSOR)


def test_phases_that_only_add_others_up_are_not_shown(clock: Clock) -> None:
    console, _ = plain(clock)
    console.phase("generation")
    console.phase("total_step_time")
    assert console._run.phase == "generation"


def test_a_console_can_be_started_again_for_the_next_stage(clock: Clock) -> None:
    out = io.StringIO()
    console = Console(file=out, live=True, clock=clock)
    for stage in ("SFT warm-up", "GRPO"):
        console.stage(stage)
        console.start("run", 1)
        console.step(1, {})
        console.close()
    console.close()
    assert out.getvalue().count(HIDE_CURSOR) == out.getvalue().count(SHOW_CURSOR) == 2


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_clock_time_reads_like_a_clock(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


def test_a_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
