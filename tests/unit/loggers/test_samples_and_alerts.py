"""Tables of samples and alerts: in the real wandb, offline, and the real MLflow, over a database file."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hidden_secrets import found_in
from nemorl_insight.loggers import MLflowConfig, WandbConfig
from nemorl_insight.loggers.run_files import COLUMNS, NewSamples
from nemorl_rl.alerts.alert import Alert
from record_files import write_records

ALERT = Alert("kl_high", "train/kl_penalty", 2, 2.0, "error", "train/kl_penalty is 2 at step 2: above 1. Far away.")


def records(run_dir: Path, split: str, step: int, count: int) -> None:
    rows = [{"split": split, "step": step, "prompt": f"{i}+1=", "response": str(i + 1), "reward": i / 4,
             "tokens": 2, "finish_reason": "stop"} for i in range(count)]  # fmt: skip
    write_records(run_dir, rows)


def test_samples_are_taken_once_and_spread_over_the_step(tmp_path: Path) -> None:
    records(tmp_path, "train", 1, 8)
    taken = NewSamples(tmp_path, 3)
    assert list(taken.take()) == []  # what is there already was sent before a resume
    records(tmp_path, "train", 2, 8)
    ((split, step, rows),) = taken.take()
    assert (split, step) == ("train", 2)
    assert [row[COLUMNS.index("prompt")] for row in rows] == ["0+1=", "2+1=", "5+1="]  # 8 * 0, 1, 2 // 3
    assert list(taken.take()) == []
    records(tmp_path, "validation", 2, 2)
    ((_, _, rows),) = taken.take()
    assert len(rows) == 2
    assert list(NewSamples(tmp_path, 0).take()) == []


@pytest.mark.slow
def test_wandb_itself_takes_tables_alerts_and_the_config(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    logger: Any = WandbConfig(mode="offline", samples=2).build(run_dir)
    (run_dir / "config.yaml").write_text("algorithm: grpo\nseed: 7\n")  # written after the loggers are built
    records(run_dir, "train", 1, 4)
    logger.log({"train/reward": 0.5}, 1)
    logger.alert(ALERT)
    records(run_dir, "train", 2, 4)
    logger.close()
    logger.close()
    tables = [json.loads(path.read_text()) for path in sorted(run_dir.rglob("*.table.json"))]
    assert [table["columns"] for table in tables] == [list(COLUMNS)] * 2
    found = sorted((row[0], row[2], row[3], row[5]) for table in tables for row in table["data"])
    assert found == [(1, "0+1=", "1", 0.0), (1, "2+1=", "3", 0.5), (2, "0+1=", "1", 0.0), (2, "2+1=", "3", 0.5)]
    file = _finished(run_dir)
    alerts, configs = _recorded(file, "alert"), _recorded(file, "config")
    assert [(alert.title, alert.text, alert.level) for alert in alerts] == [("kl_high", ALERT.text, "ERROR")]
    assert ("seed", "7") in {(item.key, item.value_json) for config in configs for item in config.update}


@pytest.mark.slow
def test_what_wandb_keeps_holds_no_secret_of_the_environment_of_what_is_printed_or_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    planted = {name: secrets.token_hex(20) for name in ("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "ACME_SECRET")}
    for name, secret in planted.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setattr(sys, "argv", ["train.py", "--db", f"postgres://me:{planted['DB_PASSWORD']}@host/runs"])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    logger: Any = WandbConfig(mode="offline").build(run_dir)
    print("401 for", os.environ["HF_TOKEN"])
    print("401 for", os.environ["ACME_SECRET"], file=sys.stderr)
    logger.log({"train/reward": 0.5}, 1)
    logger.close()
    _finished(run_dir)
    assert found_in(tmp_path, planted) == []


def _finished(run_dir: Path) -> Path:
    """What wandb wrote, once it is whole: its own process writes on after ``finish``."""
    (file,) = run_dir.rglob("*.wandb")
    end = time.monotonic() + 60
    while not _recorded(file, "exit") and time.monotonic() < end:
        time.sleep(0.02)
    return file


def _recorded(file: Path, kind: str) -> list[Any]:
    """Messages of a kind that wandb wrote: records of LevelDB's log format, in blocks of 32 KiB, after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # what is left of a block has no room for a header
            place += 32768 - place % 32768
            continue
        length, form = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if form in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == kind:
                found.append(getattr(record, kind))
    return found


@pytest.mark.full
def test_mlflow_itself_takes_tables_and_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="MLflow keeps runs in a database")
    monkeypatch.chdir(tmp_path)  # artifacts of a database without a server go to ./mlruns
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_dir = tmp_path / "run"
    logger: Any = MLflowConfig(tracking_uri=uri, samples=2).build(run_dir)
    records(run_dir, "train", 1, 4)
    logger.log({"train/reward": 0.5}, 1)
    logger.alert(ALERT)
    records(run_dir, "validation", 1, 1)
    logger.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = (run_dir / "mlflow-run-id").read_text().strip()
    assert client.get_run(run_id).data.tags["alert.kl_high"] == ALERT.text
    table = json.loads(Path(client.download_artifacts(run_id, "samples/train/step_000001.json")).read_text())
    assert table["columns"] == list(COLUMNS)
    assert [row[2:4] for row in table["data"]] == [["0+1=", "1"], ["2+1=", "3"]]
    assert client.download_artifacts(run_id, "samples/validation/step_000001.json")
