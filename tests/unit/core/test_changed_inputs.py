"""A run does not go on with other rows unnoticed, nor with other code of its rewards."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

from command_line import Command
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config import load_config
from nemorl.contracts.display import Silence
from nemorl.errors import DataError
from nemorl_grpo.trainer import GRPOTrainer
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
OTHERS = [{**row, "answer": "7"} if number == 4 else row for number, row in enumerate(ROWS)]


def reward(prompt: str, response: str) -> float:
    return float(sum(map(ord, response)) % 7)


class Shown(Silence):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    announce = message


def settings(model: Path, run_dir: Path, **changes: Any) -> Any:
    given = {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "max_steps": 1,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "generation": {"max_new_tokens": 3},
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "validation": {"every": 0},
        "checkpoint": {"every": 1, "export": False},
    }
    return load_config({**given, **changes})


def fit(config: Any, rows: Any, *, held_out: Any = ROWS, reward_fn: Any = reward, **options: Any) -> Shown:
    shown = Shown()
    config.build().fit(rows, reward_fn, val_dataset=held_out, console=shown, **options)
    return shown


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run_dir / "events.jsonl") if event["event"] == name]


def test_other_rows_are_refused_before_anything_is_loaded(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    run = tmp_path / "run"
    fit(settings(tiny_model, run), ROWS)
    shown = Shown()
    longer = settings(tiny_model, run, max_steps=2)
    with raises(DataError, "training", "step_000001", "--accept-changed-data"):
        longer.build().fit(OTHERS, reward, resume=True, console=shown)
    assert not [line for line in shown.lines if "loading" in line]
    assert not events(run, "resumed")
    # It is not in the way of those that it began with, nor in another order of their columns.
    fit(longer, [dict(reversed(row.items())) for row in ROWS], resume=True)
    assert [event["step"] for event in events(run, "finished")] == [1, 2]


def test_other_rows_that_are_accepted_are_recorded_and_are_the_run_s_from_then_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fit(settings(tiny_model, run), ROWS)
    fewer = OTHERS[:5]
    fit(settings(tiny_model, run, max_steps=2), fewer, resume=True, accept_changed_data=True)
    (change,) = events(run, "data_changed")
    assert change["what"] == "the training rows"
    assert (change["before"][:6], change["now"][:6]) == ("6 rows", "5 rows")
    assert json.loads((run / "inputs.json").read_text())["data"] == change["now"]
    fit(settings(tiny_model, run, max_steps=3), fewer, resume=True)
    assert len(events(run, "data_changed")) == 1
    assert not events(run, "failed")


def test_other_rows_to_validate_on_are_refused_unless_the_config_names_others(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    run, file = tmp_path / "run", tmp_path / "held_out.jsonl"
    named = {"validation": {"every": 0, "data": {"name": "file", "path": str(file)}}}
    fit(settings(tiny_model, run), ROWS)
    longer = settings(tiny_model, run, max_steps=2)
    with raises(DataError, "validation"):
        longer.build().fit(ROWS, reward, val_dataset=OTHERS, resume=True, console=Shown())
    file.write_text("\n".join(map(json.dumps, OTHERS)))
    fit(settings(tiny_model, run, max_steps=2, **named), ROWS, held_out=None, resume=True)
    file.write_text("\n".join(map(json.dumps, ROWS)))
    again = settings(tiny_model, run, max_steps=3, **named)
    with raises(DataError, "validation"):
        again.build().fit(ROWS, reward, resume=True, console=Shown())


class Older(GRPOTrainer):
    """Of a version that knew nothing of fingerprints."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["inputs"]
        return state


def test_a_checkpoint_without_fingerprints_is_continued_and_that_is_remarked(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    Older(settings(tiny_model, run)).fit(ROWS, reward, console=Shown())
    fit(settings(tiny_model, run, max_steps=2), OTHERS, held_out=None, resume=True)
    assert any("fingerprints" in event["message"] for event in events(run, "remark"))
    assert events(run, "finished")[-1]["step"] == 2


def test_changed_code_of_a_reward_is_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "rewards.py"
    file.write_text("LIMIT = 7\ndef score(prompt, response):\n    return float(len(response) % LIMIT)\n")

    def warnings(steps: int) -> list[str]:
        names: dict[str, Any] = {"__name__": "rewards"}
        exec(compile(file.read_text(), str(file), "exec"), names)
        linecache.checkcache()
        shown = fit(settings(tiny_model, run, max_steps=steps), ROWS, reward_fn=names["score"], resume=True)
        return [line for line in shown.lines if "the code of" in line]

    assert not warnings(1)
    assert not warnings(2)
    file.write_text(file.read_text().replace("LIMIT = 7", "LIMIT = 8"))
    assert ["rewards.score" in line for line in warnings(3)] == [True]
    assert not warnings(4)


def test_a_data_module_s_own_fingerprint_counts(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    class Stream:
        """Rows without end, of a shard."""

        def __init__(self, shard: str) -> None:
            self.shard, self.at = shard, 0

        epoch = 0

        def next_batch(self) -> list[dict[str, Any]]:
            self.at += 2
            return ROWS[:2]

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

        def fingerprint(self) -> str:
            return self.shard

    run = tmp_path / "run"
    fit(settings(tiny_model, run), Stream("a"), held_out=None)
    longer = settings(tiny_model, run, max_steps=2)
    with raises(DataError, "a", "b"):
        longer.build().fit(Stream("b"), reward, resume=True, console=Shown())
    fit(longer, Stream("a"), held_out=None, resume=True)


def test_the_command_line_accepts_changed_data(tiny_model: Path, tmp_path: Path, nemorl: Command) -> None:
    rows, config = tmp_path / "rows.jsonl", tmp_path / "sft.yaml"
    pairs = [{"prompt": "1+1=", "response": "2"}] * 4
    rows.write_text("\n".join(map(json.dumps, pairs)))
    config.write_text(
        json.dumps(
            {
                "algorithm": "sft",
                "model": str(tiny_model),
                "run_dir": str(tmp_path / "run"),
                "max_steps": 1,
                "batch_size": 2,
                "data": {"name": "file", "path": str(rows)},
                "policy": {"init": "random", "max_sequence_tokens": 32},
                "checkpoint": {"export": False},
            }
        )
    )
    assert nemorl("train", config).code == 0
    rows.write_text(rows.read_text().replace("2", "3"))
    refused = nemorl("train", config, "max_steps=2")
    assert (refused.code, "--accept-changed-data" in refused.err) == (2, True)
    assert nemorl("train", config, "max_steps=2", "--accept-changed-data").code == 0
