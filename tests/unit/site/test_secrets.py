"""Secrets are kept out of what a run writes, and the hunter of the test on Ray finds them in any disguise."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from command_line import Command
from hidden_secrets import found_in
from nemorl.base.files.jsonl import JsonlWriter, read_jsonl
from nemorl.base.files.ownership import Owner
from nemorl.base.text.secrets import redacted, secret_values
from nemorl.config import load_config
from nemorl.errors import ConfigError
from nemorl_cli.console import Console
from nemorl_ops.launch.prepare import prepare
from nemorl_trust.audit.log import AuditLog
from nemorl_trust.provenance import describe_environment
from nemorl_trust.secret_check import secret_problems
from recorded_messages import Raises

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


# What a stranger would look for


ODD = """pa"ss\\w'rd-é-/+&%"""
"""Escaped differently by JSON, Python, shells and URLs."""


@pytest.mark.parametrize("secret", [ODD, "12345678901", "/9j+abcDEF012345", "line one\nline two"])
def test_a_secret_of_any_characters_is_kept_out(secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", secret)
    monkeypatch.setattr(sys, "argv", ["nemorl", "train", f"x={secret}"])
    error = f"{ConnectionError(secret)!r} {secret} {json.dumps({'a': secret})} {quote(secret)}"
    with JsonlWriter(tmp_path / "events.jsonl") as events:
        events.write({"error": error, secret: [{"deep": secret}], "count": 12345678901})
    AuditLog(tmp_path / "audit.jsonl").append("x", {"error": error, "bytes": 12345678901})
    (tmp_path / "run.lock").write_text(Owner.me().command)
    (written,) = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert written["<DB_PASSWORD>"] == [{"deep": "<DB_PASSWORD>"}]
    assert written["count"] == 12345678901, "a number is no text"
    if secret != "12345678901":
        assert found_in(tmp_path, {"DB_PASSWORD": secret}) == []


def test_a_variable_that_is_no_utf8_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = os.fsdecode(b"caf\xe9-s3cr3t-0123")
    monkeypatch.setenv("DB_PASSWORD", secret)
    assert redacted(f"no {secret}, nor caf%E9-s3cr3t-0123") == "no <DB_PASSWORD>, nor <DB_PASSWORD>"


def test_half_of_a_surrogate_pair_beside_a_secret_ends_no_writer(tmp_path: Path, token: str) -> None:
    with JsonlWriter(tmp_path / "samples.jsonl") as samples:
        samples.write({"text": f"\ud83d {token}"})
    assert list(read_jsonl(tmp_path / "samples.jsonl")) == [{"text": "\ud83d <HF_TOKEN>"}]


def test_of_secrets_that_overlap_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 6, "password"), (3, 12, "token"), (14, 16, "key")]
    monkeypatch.setattr("nemorl.base.text.secrets.secrets_by_form", lambda text: found)
    assert redacted("0123456789abcdefgh") == "<password>cd<key>gh"


def test_the_password_of_a_url_is_kept_out_wherever_the_url_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pr0xy%2Fsecret@proxy:3128")
    assert redacted("407 for pr0xy/secret") == "407 for <HTTPS_PROXY>"
    assert redacted("at postgresql+psycopg://me:hunter2x@db/x now") == "at postgresql+psycopg://me:<password>@db/x now"
    assert redacted("clone https://:tok3n@git.example.org/a") == "clone https://:<password>@git.example.org/a"
    for harmless in ("https://node7:8000/a@b", "see https://example.org/@me", "at 10:30 me@example.org", "a://b c:d@e"):
        assert redacted(harmless) == harmless


def test_a_variable_of_any_name_is_a_secret_where_somebody_says_so() -> None:
    variables = {"JUDGE": "s3cr3t-of-the-judge", "OTHER": "no secret of anybody"}
    assert secret_values(variables) == {}
    for named in ("HF_TOKEN,JUDGE", "HF_TOKEN, JUDGE ", "JUDGE"):
        assert secret_values({**variables, "NEMORL_SECRETS": named}) == {"JUDGE": "s3cr3t-of-the-judge"}


def test_a_key_in_a_variable_that_nobody_knows_for_one_is_remarked_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"name": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "JUDGE"}
    config = load_config({"algorithm": "grpo", "model": "m", "data": "arithmetic", "environment": judge})
    monkeypatch.setenv("JUDGE", "s3cr3t-of-the-judge")
    said: list[str] = []
    assert list(secret_problems(config, Path(), said.append)) == []
    assert len(said) == 1
    assert "export NEMORL_SECRETS=JUDGE" in said[0]
    monkeypatch.setenv("NEMORL_SECRETS", "JUDGE")
    assert list(secret_problems(config, Path(), said.append)) == []
    assert len(said) == 1


def test_an_error_that_holds_a_secret_is_said_without_it(token: str, tmp_path: Path, nemorl: Command) -> None:
    said = nemorl("train", tmp_path / f"{token}.yaml", "--debug").err
    assert "<HF_TOKEN>.yaml" in said
    assert token not in said


def test_what_a_run_says_above_its_progress_is_without_secrets(token: str) -> None:
    output = io.StringIO()
    Console(file=output).message(f"warning: 401 for Bearer {token}")
    assert output.getvalue() == "warning: 401 for Bearer <HF_TOKEN>\n"


def test_a_private_key_is_kept_out_also_where_it_is_cut() -> None:
    begun = "x -----BEGIN EC PRIVATE KEY-----\nMHcCAQEE"
    assert redacted(begun) == "x <private key>"
    assert redacted(f"{begun}\n-----END EC PRIVATE KEY-----\ny") == "x <private key>\ny"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X", "https://me:hunter2x@example.org"),
        ("X", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl"),
        ("X", f"hf_{'aB3' * 12}"),
        ("X", f"sk-ant-{'aB3' * 12}"),
        ("X", "AKIAIOSFODNN7EXAMPLE"),  # AWS's own example
        ("API_KEY", "any text of some length"),
        ("Authorization", "Basic bWU6aHVudGVyMg=="),
        ("db.password", "correct horse"),
        ("HF_TOKEN", "any text of some length"),
        ("GH_PAT", "any text of some length"),
        ("X", "--export=NONE,HF_TOKEN=anyTextOfSomeLength"),
        ("X", "module load x; export DB_SECRET='anyTextOfSomeLength'"),
    ],
)
def test_a_config_that_holds_a_secret_of_its_own_is_refused(name: str, value: str) -> None:
    data: dict[str, Any] = {"algorithm": "sft", "model": "org/model", "data": "arithmetic"}
    config = load_config({**data, "cluster": {"launcher": "ray", "env_vars": {name: value}}})
    (problem,) = secret_problems(config, Path())
    assert problem.path == f"cluster.env_vars.{name}"
    assert value not in f"{problem.message} {problem.fix}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("API_KEY", "EMPTY"), ("X", "https://node7:8000"), ("PAD_TOKEN", "<|end_of_text|>"), ("X", "me@example.org:22"),
        ("SSH_KEY", "/home/me/.ssh/id_ed25519"), ("HF_TOKEN", "$TOKEN_OF_THE_NODE"),
        ("X", "export HF_TOKEN=$(cat ~/token)"),
        ("X", "export SSH_KEY=/home/me/.ssh/id_ed25519"), ("X", "TOKENIZERS_PARALLELISM=something"),
    ],
)  # fmt: skip
def test_what_only_looks_like_one_is_none(name: str, value: str) -> None:
    data: dict[str, Any] = {"algorithm": "sft", "model": "org/model", "data": "arithmetic"}
    config = load_config({**data, "cluster": {"launcher": "ray", "env_vars": {name: value}}})
    assert [*secret_problems(config, Path())] == []


def test_a_config_that_holds_a_secret_is_not_valid(tmp_path: Path, nemorl: Command) -> None:
    (tmp_path / "run.yaml").write_text(
        f"{{algorithm: sft, model: org/m, data: {{name: file, path: rows.jsonl, prompt_template: 'sk-{'aB3' * 12}'}}}}"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}')
    done = nemorl("config", "validate", tmp_path / "run.yaml", f"data.path={tmp_path / 'rows.jsonl'}")
    assert done.code == 2
    assert "data.prompt_template: holds a key of some service" in done.err
    assert "aB3aB3" not in done.err


def test_a_launch_is_refused_before_its_files_are_written(tmp_path: Path, raises: Raises) -> None:
    (tmp_path / "run.yaml").write_text("{algorithm: sft, model: org/model, data: arithmetic}")
    changes = ["cluster.launcher=ray", "cluster.env_vars={DB: 'postgres://me:hunter2x@db'}", f"run_dir={tmp_path}/run"]
    with raises(ConfigError, path="cluster.env_vars.DB"):
        prepare(tmp_path / "run.yaml", changes, on="local", name="a", root=tmp_path)
    with raises(ConfigError, path="launch.setup"):
        prepare(
            tmp_path / "run.yaml",
            [changes[2], "launch.setup=export HF_TOKEN=anyTextOfSomeLength"],
            on="local", name="a", root=tmp_path,
        )  # fmt: skip
    with raises(ConfigError, path="launch.environment.PROXY"):
        changes = [changes[2], "launch.environment={PROXY: 'http://me:hunter2x@proxy'}"]
        prepare(tmp_path / "run.yaml", changes, on="local", name="a", root=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml"}


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
