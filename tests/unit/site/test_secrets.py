"""Secrets are kept out of what a run writes, and the hunter of the test on Ray finds them in any disguise."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hidden_secrets import found_in
from nemorl.config import load_config
from nemorl_base.audit.log import AuditLog
from nemorl_base.jsonl import JsonlWriter
from nemorl_base.ownership import Owner
from nemorl_base.secrets import redacted, secret_values
from nemorl_report.provenance import describe_environment
from nemorl_report.secret_check import secret_problems

SECRET = "hf_s3cr3t/va+lue-0123456789"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return SECRET


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True), ("WANDB_API_KEY", True), ("OPENAI_API_KEY", True), ("NEMORL_SERVE_KEY", True),
               ("DB_PASSWORD", True), ("AWS_SECRET", True), ("TOKENIZERS_PARALLELISM", False), ("KEYBOARD", False),
    ],
)  # fmt: skip
def test_secrets_are_told_by_their_names(name: str, is_secret: bool) -> None:
    assert bool(secret_values({name: "x" * 8})) is is_secret
    assert secret_values({name: "x" * 7}) == {}, "it would be found in any text"


def test_what_is_written_names_the_variable_in_its_place(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["nemorl", "train", f"data.key={token}"])
    with JsonlWriter(tmp_path / "events.jsonl") as events:
        events.write({"event": "failed", "error": f"401 for Bearer {token}"})
    AuditLog(tmp_path / "audit.jsonl").append("x", {"url": f"https://a/?t={token}"})
    (tmp_path / "environment.json").write_text(
        json.dumps(describe_environment(SimpleNamespace(index=SimpleNamespace(entries=())))["command"])  # type: ignore[arg-type]
    )
    (tmp_path / "run.lock").write_text(Owner.me().command)
    assert found_in(tmp_path, {"HF_TOKEN": token}) == []
    assert json.loads((tmp_path / "events.jsonl").read_text())["error"] == "401 for Bearer <HF_TOKEN>"
    assert redacted("https://a/?t=hf_s3cr3t%2Fva%2Blue-0123456789") == "https://a/?t=<HF_TOKEN>"


def test_a_secret_in_a_config_is_refused_before_it_is_written(token: str) -> None:
    data: dict[str, Any] = {"algorithm": "sft", "model": "org/model", "data": "arithmetic"}
    config = load_config({**data, "cluster": {"launcher": "ray", "env_vars": {"ANY": f"x{token}"}}})
    (problem,) = secret_problems(config, Path(), print)
    assert problem.path == "cluster.env_vars.ANY"
    assert token not in f"{problem.message} {problem.fix}"
    assert [*secret_problems(load_config(data), Path(), print)] == []


# The hunter itself: were it blind, its finding nothing would mean nothing


def parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [["a", f"say {SECRET}"]]})
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), compression="zstd")


DISGUISES: dict[str, Any] = {
    "plain": lambda path: path.write_text(f"a {SECRET} b"),
    "base64": lambda path: path.write_bytes(base64.b64encode(f"user:{SECRET}".encode())),
    "base64, one further": lambda path: path.write_bytes(base64.b64encode(f"users:{SECRET}".encode())),
    "base64, two further": lambda path: path.write_bytes(base64.urlsafe_b64encode(f"userss:{SECRET}".encode())),
    "hexadecimal": lambda path: path.write_text(SECRET.encode().hex()),
    "hexadecimal, upper case": lambda path: path.write_text(SECRET.encode().hex().upper()),
    "percent-encoded": lambda path: path.write_text("hf_s3cr3t%2Fva%2Blue-0123456789"),
    "HTML": lambda path: path.write_text("hf_s3cr3t&#x2F;va&#43;lue-0123456789"),
    "escaped JSON": lambda path: path.write_text(json.dumps(SECRET).replace("/", "\\/")),
    "escaped JSON, by number": lambda path: path.write_text("".join(f"\\u{ord(c):04x}" for c in SECRET)),
    "UTF-16": lambda path: path.write_text(SECRET, encoding="utf-16"),
    "backwards": lambda path: path.write_text(SECRET[::-1]),
    "gzip": lambda path: path.write_bytes(gzip.compress(SECRET.encode())),
    "parquet": parquet,
    "the name of a file": lambda path: path.with_name(SECRET.replace("/", "%2F")).write_text(""),
    "the target of a link": lambda path: path.symlink_to(f"/nowhere/{SECRET}"),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_the_hunter_finds_a_secret_in_any_disguise(tmp_path: Path, disguise: str) -> None:
    DISGUISES[disguise](tmp_path / "file")
    assert [name for name, _ in found_in(tmp_path, {"HF_TOKEN": SECRET})] == ["HF_TOKEN"]
