"""``nemorl doctor RUN``: which inputs reach the model of a run, from what the run left behind."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command, command
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_rl.models.tiny_sight import write_tiny_sight
from nemorl_testing.models import tiny_model
from record_files import write_records


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    run = command(monkeypatch, capfd)
    return lambda *arguments: run("doctor", *arguments)


# Words of an environment, in records that were made up


def record(group: int, ids: Sequence[int], mask: str, media: Sequence[Any] = ()) -> dict[str, Any]:
    """An episode. ``mask``: p for the prompt, a for an answer, o for an observation."""
    authors = {"p": "prompt", "a": "policy", "o": "environment"}
    starts = [place for place in range(len(mask)) if not place or mask[place] != mask[place - 1]]
    return {
        "split": "train",
        "step": 3,
        "group": group,
        "group_id": f"train-3-{group}",
        "sample_id": f"train-3-{group}-0",
        "prompt": "?",
        "response": "!",
        "reward": 1.0,
        "valid": True,
        "finish_reason": "stop",
        "num_turns": sum(mask[place] == "a" for place in starts),
        "prompt_tokens": mask.count("p"),
        "weight_versions": [2],
        "media": list(media),
        "turns": [
            {"author": authors[mask[start]], "text": "", "sequence": 0, "start": start, "stop": stop}
            for start, stop in zip(starts, [*starts[1:], len(mask)], strict=True)
        ],
        "sequences": [
            {"token_ids": ids, "mask": [each == "a" for each in mask], "generation_logprobs": [0.0] * len(ids)}
        ],
    }


TOLD = record(0, [10, 11, 20, 21, 30, 31, 32, 40, 41], "ppaaoooaa")
ALONE = record(1, [10, 11, 20, 21], "ppaa")
CUT_SHORT = record(2, [10, 11, 20, 21, 30, 31], "ppaaoo")


def recorded_run(folder: Path, model: Path, *rows: dict[str, Any], **changes: Any) -> Path:
    run = folder / "run"
    run.mkdir()
    config = {"algorithm": "grpo", "model": str(model), "max_steps": 3, "environment": "math", "data": "arithmetic"}
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "cluster": {"gpus_per_node": 0}, **changes}))
    write_records(run, rows)
    return run


def short_sighted() -> Path:
    """A model each of whose tokens sees itself and the one before."""
    return tiny_model(num_hidden_layers=1, use_sliding_window=True, sliding_window=2, max_window_layers=0)


def test_words_of_the_environment_reach_a_model_that_looks_back(tmp_path: Path, doctor: Command) -> None:
    run = recorded_run(tmp_path, tiny_model(num_hidden_layers=1), ALONE, TOLD)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = doctor(run, "--json")
    assert done.code == 0, done.err
    assert done.json == {
        "run": str(run),
        "ok": True,
        "checkpoint": None,
        "inputs": {
            "image": {"answer": "absent", "rows": "the records"},
            "audio": {"answer": "absent", "rows": "the records"},
            "observation": {"answer": "reaches", "rows": "the records of step 3"},
        },
        "problem": None,
    }
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_words_of_the_environment_that_a_model_does_not_look_back_to_are_named(tmp_path: Path, doctor: Command) -> None:
    """Turned round, 7 8 5 6 8 7 is 7 8 6 5 8 7: of what the answer's first token sees, 8 7, nothing changes."""
    said = record(0, [10, 11, 20, 21, 7, 8, 5, 6, 8, 7, 40, 41], "ppaaooooooaa")
    (tmp_path / "far").mkdir()
    assert doctor(recorded_run(tmp_path / "far", tiny_model(num_hidden_layers=1), said)).code == 0
    done = doctor(recorded_run(tmp_path, short_sighted(), said))
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if line.startswith("observation")]
    assert "does not reach the model" in line


def test_what_cannot_be_told_is_no_verdict(tmp_path: Path, doctor: Command) -> None:
    said = record(0, [10, 11, 20, 21, 30, 31, 30, 40, 41], "ppaaoooaa")
    done = doctor(recorded_run(tmp_path, tiny_model(num_hidden_layers=1), said), "--json")
    assert (done.code, done.json["inputs"]["observation"]["answer"]) == (0, "unknown")


@pytest.mark.parametrize("rows", [[ALONE], [CUT_SHORT]])
def test_a_run_of_answers_alone_has_no_such_input(rows: list[Any], tmp_path: Path, doctor: Command) -> None:
    done = doctor(recorded_run(tmp_path, tiny_model(num_hidden_layers=1), *rows), "--json")
    assert done.code == 0, done.err
    assert {found["answer"] for found in done.json["inputs"].values()} == {"absent"}


def test_a_model_that_is_gone_is_the_reason(tmp_path: Path, doctor: Command) -> None:
    run = recorded_run(tmp_path, tmp_path / "gone", TOLD)
    done = doctor(run, "--json")
    assert done.code == 1
    assert (done.json["ok"], done.json["inputs"]) == (False, {})
    assert str(tmp_path / "gone") in done.json["problem"]["what"]
    shown = doctor(run)
    assert shown.code == 1
    assert str(tmp_path / "gone") in shown.out
    other = doctor(run, f"model={tiny_model(num_hidden_layers=1)}")
    assert other.code == 0, other.err


def test_an_image_whose_file_is_gone_is_the_reason(tmp_path: Path, doctor: Command) -> None:
    item = {"digest": "0123456789abcdef" * 4, "kind": "image", "tokens": 2}
    shown = record(0, [10, -1, -1, 20], "pppa", [item])
    done = doctor(recorded_run(tmp_path, tiny_model(num_hidden_layers=1), shown), "--json")
    assert done.code == 1
    assert "0123456789ab" in done.json["problem"]["what"]


def test_records_that_cannot_be_read_are_not_taken_for_empty(tmp_path: Path, doctor: Command) -> None:
    run = recorded_run(tmp_path, tiny_model(num_hidden_layers=1), ALONE)
    (run / "records/train/step_000002.parquet").write_bytes(b"PAR1")
    done = doctor(run, "--json")
    assert done.code == 0, done.err
    rows = "the records, 1 of whose files are damaged"
    assert done.json["inputs"]["image"] == {"answer": "unknown", "rows": rows}


def test_one_run_is_looked_at_at_a_time(tmp_path: Path, doctor: Command) -> None:
    run = recorded_run(tmp_path, tmp_path / "gone", ALONE)
    assert doctor(run, run).code == 2
    assert doctor(run, "--model", "some/model").code == 2
    assert doctor(tmp_path / "none").code == 2
    assert doctor("policy.precision=float32").code == 2


# Images, in runs that were made


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the encoder makes of images is taken for zero, and building a model does not notice."""
    from nemorl_media.families.qwen_vl import Qwen25VL
    from nemorl_media.family import Seen

    encode = Qwen25VL.encode
    monkeypatch.setattr(Qwen25VL, "encode", lambda *args: Seen(encode(*args).embeds * 0.0))
    monkeypatch.setattr("nemorl_dtensor.verification._verify_sight", lambda *_: None)


@pytest.fixture(scope="module", params=["grpo", "sft"])
def seeing_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of an algorithm that records episodes, and of one that does not."""
    folder = tmp_path_factory.mktemp(request.param)
    sampling = {
        "environment": "math",
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "generation": {"max_new_tokens": 2},
    }
    config = {
        "algorithm": request.param,
        "model": str(write_tiny_sight(folder / "model")),
        "run_dir": str(folder / "run"),
        "data": {"name": "drawings", "num_train": 8, "num_validation": 0},
        "max_steps": 1,
        "policy": {"init": "random"},
        "validation": {"every": 0, "at_end": False},
        **(sampling if request.param == "grpo" else {"batch_size": 4}),
    }
    load_config(config).build().fit(None, console=Console(quiet=True))
    return folder / "run"


def test_images_reach_a_model_that_sees(seeing_run: Path, doctor: Command) -> None:
    done = doctor(seeing_run, "--json")
    assert done.code == 0, done.err
    rows = "the records of step 1" if (seeing_run / "records").exists() else "the first batch"
    assert done.json["inputs"]["image"] == {"answer": "reaches", "rows": rows}
    assert done.json["inputs"]["audio"]["answer"] == "absent"
    assert done.json["checkpoint"] == 1


@pytest.mark.usefixtures("blind")
def test_images_do_not_reach_a_model_that_is_blind(seeing_run: Path, doctor: Command) -> None:
    done = doctor(seeing_run, "--json")
    assert done.code == 1
    assert done.json["inputs"]["image"]["answer"] == "does_not_reach"
    assert done.json["problem"] is None


def test_a_damaged_checkpoint_is_the_reason(seeing_run: Path, tmp_path: Path, doctor: Command) -> None:
    run = tmp_path / "run"
    shutil.copytree(seeing_run, run)
    (weights,) = run.glob("checkpoints/*/policy/model/*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    done = doctor(run, "--json")
    assert done.code == 1
    assert (done.json["inputs"], done.json["problem"] is None) == ({}, False)
