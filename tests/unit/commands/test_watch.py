"""``nemorl view watch``: what a run adds is shown once, and it ends with the run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Command
from nemorl.base.files.ownership import FILE, Ownership
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_cli import watch
from nemorl_cli.following import Following, Tail, lines_after
from nemorl_rl.rollouts.completions import Completions, completion_text
from record_files import write_records


def add(path: Path, *records: dict[str, Any], end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def rollout(run: Path, step: int, response: str) -> None:
    facts = {"prompt": "1+1=", "reward": 0.5, "tokens": 3, "finish_reason": "stop", "sample_id": f"train-{step}-0-0"}
    write_records(run, [{"split": "train", "step": step, "response": response, **facts}])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run at step 2 of 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: grpo\nmax_steps: 4\n")
    add(folder / "metrics.jsonl", *({"step": s, "time": 100.0 + s, "train/reward": s / 4} for s in (1, 2)))
    add(folder / "events.jsonl", {"time": 100.0, "event": "started"})
    rollout(folder, 1, "first")
    rollout(folder, 2, "second")
    return folder


def test_a_tail_gives_whole_lines_once_also_after_the_file_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.read()) == []
    add(path, {"a": 1}, {"a": 2})
    add(path, {"a": 3}, end="")
    assert [record["a"] for record in tail.read()] == [1, 2]
    add(path, {}, end="\n")  # the third line turns out to be two objects: no record
    assert list(tail.read()) == []
    path.write_text('{"a": 1}\n')  # a run that went back
    assert list(tail.read()) == []
    add(path, {"a": 9})
    assert [record["a"] for record in tail.read()] == [9]


def test_a_run_that_goes_on_is_followed_to_its_end(run: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def go_on(_seconds: float) -> None:
        """In place of the wait for something new: it comes."""
        rollout(run, 3, "third\x1b[2J")
        add(run / "metrics.jsonl", {"step": 3, "time": 103.0, "train/reward": 0.75})
        add(run / "events.jsonl", {"time": 104.0, "event": "finished"})

    monkeypatch.setattr(watch, "time", SimpleNamespace(time=time.time, sleep=go_on))
    owner = Ownership(run)
    done = nemorl("view", "watch", run)
    owner.close()
    assert done.code == 0, done.err
    assert "run, 4 steps" in done.err
    assert "step 3/4  reward 0.750" in done.err
    assert done.err.count("second") == 1  # the newest when it began
    assert "first" not in done.err
    assert "third\\x1b[2J" in done.err
    assert "\x1b" not in done.err
    assert done.err.rstrip().endswith("the run is finished")


def test_json_has_an_object_a_line(run: Path, nemorl: Command) -> None:
    add(run / "events.jsonl", {"time": 104.0, "event": "failed", "error": "BackendError: no memory"})
    done = nemorl("view", "watch", run, "--json")
    assert done.code == 1
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [next(iter(one)) for one in found] == ["event", "event", "metrics", "metrics", "sample"]
    assert found[-1]["sample"]["response"] == "second"
    done = nemorl("view", "watch", run)
    assert done.err.rstrip().endswith("the run failed: BackendError: no memory")


def test_a_run_whose_process_is_gone_is_not_waited_for(run: Path, nemorl: Command) -> None:
    done = nemorl("view", "watch", run)
    assert done.code == 1
    assert "gone without a word" in done.err
    (run / FILE).write_text("")  # an owner that is just writing its name: nothing is known of it
    assert Following(run).status == "incomplete"


def test_what_is_no_run_is_refused(tmp_path: Path, nemorl: Command) -> None:
    done = nemorl("view", "watch", tmp_path)
    assert done.code == 2
    assert "not a run directory" in done.err


# Responses that a run shows itself


def sample(index: int, response: str) -> Sample:
    prompt = Prompt(index, f"prompt {index}", (5,))
    return Sample(prompt, (5, 7), (False, True), (0.0, -0.5), Score(1.0), response, "length")


def test_a_run_shows_as_many_responses_as_asked_for_from_different_groups() -> None:
    shown: list[str] = []
    trainer: Any = SimpleNamespace(run=SimpleNamespace(console=SimpleNamespace(message=shown.append)))
    Completions(2).on_rollout_end(trainer, 3, Samples([sample(i // 4, f"response {i}") for i in range(8)]))
    assert shown == [
        "step 3: reward 1, 1 tokens, cut off\n  prompt    prompt 0\n  response  response 0",
        "step 3: reward 1, 1 tokens, cut off\n  prompt    prompt 1\n  response  response 4",
    ]
    Completions(0).on_rollout_end(trainer, 4, Samples([sample(0, "none")]))
    assert len(shown) == 2


def test_a_long_response_keeps_its_beginning_and_end_in_one_line() -> None:
    text = completion_text(1, "p", "begin\n" + "x" * 400 + "end", reward=0.0, tokens=1).splitlines()[-1]
    assert text.startswith("  response  begin ⏎ xxx")
    assert "… 111 more characters …" in text  # 411 characters with the sign for the line end, of which 300 are shown
    assert text.endswith("xend")


def test_lines_that_are_no_objects_are_skipped_and_long_ones_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert lines_after(path, 5) == ([], 0)
    path.write_bytes(b'[1]\n{"a": \xff}\n{"b": "' + b"x" * (3 << 20) + b'"}\n{"c"')
    lines, offset = lines_after(path, 0)
    while (more := lines_after(path, offset))[1] != offset:
        lines += more[0]
        offset = more[1]
    assert [len(line["b"]) for line in lines] == [3 << 20]
