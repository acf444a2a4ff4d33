"""``nemorl view samples``: the ones asked for, as they are, and nothing in them acts on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from record_files import write_records

ATTACK = "\x1b[2J\x1b]52;c;ZWNobw==\x07 [bold]not bold[/] \u202eevil"


def row(step: int, group: int, place: int, reward: float, **others: Any) -> dict[str, Any]:
    group_id = f"train-{step}-{group}"
    turns = [
        {"author": "prompt", "text": f"<user> sum {group}", "sequence": 0, "start": 0, "stop": 1},
        {"author": "policy", "text": "first", "sequence": 0, "start": 1, "stop": 2, "reward": 0.25},
        {"author": "environment", "text": "go on", "sequence": 0, "start": 2, "stop": 3},
        {"author": "policy", "text": f"answer {place}", "sequence": 0, "start": 3, "stop": 4},
    ]
    sequence = {
        "token_ids": [5, 6, 7, 8],
        "mask": [False, True, False, True],
        "generation_logprobs": [0.0, -1.0, 0.0, -2.0],
        "old_logprobs": [0.0, -1.5, 0.0, -2.0],
        "loss_weights": [0.0, 0.5, 0.0, 0.5],
    }
    return {
        "split": "train",
        "step": step,
        "group": group,
        "group_id": group_id,
        "sample_id": f"{group_id}-{place}",
        "prompt": f"sum {group}",
        "response": f"answer {place}",
        "answer": "4",
        "reward": reward,
        "correct": reward > 0,
        "advantage": reward - 0.5,
        "tokens": 2,
        "num_turns": 2,
        "finish_reason": "stop",
        "turns": turns,
        "sequences": [sequence],
        **others,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two groups of two; in step 2 nobody solves group 1."""
    rewards = {(1, 0): (1.0, 0.0), (1, 1): (1.0, 1.0), (2, 0): (0.75, 0.25), (2, 1): (0.0, -1.0)}
    rows = [row(*place, i, reward) for place, pair in rewards.items() for i, reward in enumerate(pair)]
    rows[1] |= {"finish_reason": "length", "response": "it never ends", "filtered": "overlong"}
    rows[1] |= {"began_s": -0.5, "ended_s": 2.0}
    write_records(tmp_path / "run", rows)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], ["2-0-0", "2-0-1", "2-1-0", "2-1-1"]),
        (["--worst", 2], ["2-1-1", "2-1-0"]),
        (["--best", 1], ["2-0-0"]),
        (["--step", 1, "--worst", 1], ["1-0-1"]),
        (["--group", 1], ["2-1-0", "2-1-1"]),
        (["--all-wrong"], ["2-1-0", "2-1-1"]),
        (["--step", 1, "--all-wrong"], []),
        (["--step", 1, "--truncated"], ["1-0-1"]),
        (["--step", 1, "--filtered"], ["1-0-1"]),
        (["--search", "NEVER ends"], ["1-0-1"]),
        (["--search", "sum 1", "--best", 3], ["1-1-0", "1-1-1", "2-1-0"]),
        (["--limit", 3], ["2-0-0", "2-0-1", "2-1-0"]),
    ],
)
def test_the_samples_asked_for_come_in_the_order_asked_for(
    options: Sequence[object], found: list[str], run: Path, nemorl: Command
) -> None:
    done = nemorl("view", "samples", run, *options, "--json")
    assert done.code == 0, done.err
    assert [record["sample_id"] for record in done.json] == [f"train-{name}" for name in found]


def test_a_sample_is_shown_with_what_became_of_it(run: Path, nemorl: Command) -> None:
    done = nemorl("view", "samples", run, "--step", 1, "--truncated")
    assert [line.rstrip() for line in done.out.splitlines()] == [
        "train-1-0-1 · reward 0 · wrong · advantage -0.500 · 2 tokens · 2 turns · 2.5 s · cut off"
        " · not trained on: overlong",
        "  prompt    sum 0",
        "  response  it never ends",
        "  answer    4",
        "",
    ]
    assert nemorl("view", "samples", run, "--step", 1, "--all-wrong").out == "no such samples\n"


def test_a_failed_episode_is_shown_with_who_failed(tmp_path: Path, nemorl: Command) -> None:
    failed = {"outcome": "infrastructure", "cause": "reset: node3 refused", "valid": False, "correct": None}
    write_records(tmp_path / "run", [row(1, 0, 0, 0.0, **failed)])
    done = nemorl("view", "samples", tmp_path / "run", "--step", 1)
    assert " · infrastructure: reset: node3 refused" in " ".join(done.out.split())


def test_in_full_every_turn_has_its_author_and_what_it_earned(run: Path, nemorl: Command) -> None:
    lines = [line.rstrip() for line in nemorl("view", "samples", run, "--best", 1, "--full").out.splitlines()]
    assert lines[1:] == [
        "  prompt       <user> sum 0",
        "  policy       first  (earned 0.25)",
        "  environment  go on",
        "  policy       answer 0",
        "  answer       4",
        "",
    ]


def test_tokens_show_where_trainer_and_sampler_differ(run: Path, nemorl: Command) -> None:
    (run / "records/_tokens.jsonl").write_text('{"id": 7, "text": "go\\n"}\n{"id": 9')
    done = nemorl("view", "samples", run, "--best", 1, "--tokens")
    rows = [line.split() for line in done.out.splitlines() if line[:1].isdigit()]
    assert rows == [
        ["0", "5", "prompt", "–", "–", "–", "0.00e+00"],
        ["1", "6", "policy", "-1.000", "-1.500", "-0.5000", "5.00e-01"],
        ["2", "go\\n", "environment", "–", "–", "–", "0.00e+00"],
        ["3", "8", "policy", "-2.000", "-2.000", "+0.0000", "5.00e-01"],
    ]
    (whole,) = nemorl("view", "samples", run, "--best", 1, "--tokens", "--json").json
    assert whole["sequences"][0]["token_ids"] == [5, 6, 7, 8]
    (light,) = nemorl("view", "samples", run, "--best", 1, "--json").json
    assert not {"turns", "sequences"} & set(light)


def test_long_responses_show_their_beginning_and_their_end(run: Path, nemorl: Command) -> None:
    lines = [f"line {number}" for number in range(100)]
    write_records(run, [row(3, 0, 0, 1.0, response="\n".join(lines))])
    shown = [line.strip() for line in nemorl("view", "samples", run).out.splitlines()]
    assert shown[2:9] == ["response  line 0", "line 1", "line 2", "… 94 more lines …", "line 97", "line 98", "line 99"]
    write_records(run, [row(3, 0, 0, 1.0, response="x" * 700)])
    assert "… 100 more characters …" in nemorl("view", "samples", run).out.replace("\n", " ")


@pytest.mark.parametrize("width", [40, 200])
def test_what_a_model_writes_does_not_act_on_the_terminal(
    width: int, run: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    hostile = row(3, 0, 0, 1.0, prompt=ATTACK, response=ATTACK, answer=ATTACK, given=ATTACK)
    hostile["turns"][1]["text"] = ATTACK
    write_records(run, [hostile])
    for options in ([], ["--full"], ["--tokens"]):
        out = nemorl("view", "samples", run, *options).out
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "\\x1b[2J" in out
        assert "[bold]not" in out


def test_what_is_not_there_is_said(run: Path, nemorl: Command, tmp_path: Path) -> None:
    done = nemorl("view", "samples", run, "--step", 7)
    assert done.code == 2
    assert "no records of step 7" in done.err
    assert "the closest are of step 2" in done.err
    done = nemorl("view", "samples", tmp_path / "nowhere")
    assert done.code == 2
    assert "is not a run directory" in done.err
    assert nemorl("view", "samples", run, "--worst", 1, "--best", 1).code == 2
    assert nemorl("view", "samples", run, "--split", "test").code == 2


def test_a_damaged_file_is_named_and_the_rest_is_shown(run: Path, nemorl: Command) -> None:
    (run / "records/train/step_000001.parquet").write_bytes(b"PAR1 torn")
    done = nemorl("view", "samples", run, "--search", "sum", "--json")
    assert {record["step"] for record in done.json} == {2}
    assert "skipped " in done.err
    assert "step_000001.parquet" in done.err
