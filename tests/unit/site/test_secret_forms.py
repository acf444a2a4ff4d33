"""Secrets by their form: what somebody would really write, and what only looks like it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nemorl.base.text.secret_forms import secrets_by_form
from nemorl.base.text.secrets import redacted
from nemorl.config import load_config
from nemorl_trust.secret_check import secret_problems, secrets_in

ROOT = Path(__file__).parents[3]
MIXED = "aB3dE6gH9kL2mN5pQ8sT1vW4yZ7"
"""What each of these forms holds; made of parts, so that no scanner takes this file for a leak."""
HEX = "0123456789abcdef" * 4
FORMS = [
    # headers, cookies and tokens
    f"Authorization: Bearer {MIXED}", f'"Authorization": "Bearer {MIXED}"', "Authorization: Basic dXNlcjpodW50ZXIyMg==",
    f"curl -H 'Authorization: Token {MIXED}'", f"Authorization: {MIXED}", f"Proxy-Authorization: {MIXED}",
    f"X-Api-Key: {MIXED}", f"x-api-key={MIXED}", f"Cookie: session={MIXED}; theme=dark",
    f"Set-Cookie: sid={MIXED}; Path=/",
    f"bearer {MIXED}", f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{MIXED}",
    # URLs
    f"https://api.example.org/v1?api_key={MIXED}", f"https://h.test/x?a=1&token={MIXED}",
    f"https://h.test/?key={MIXED}",
    f"https://acc.blob.example.net/c/f.parquet?sv=2022&sig={MIXED}%3D",
    f"https://b.s3.example.com/k?X-Amz-Signature={HEX}", f"https://b.s3.example.com/k?X-Amz-Security-Token={MIXED}",
    f"https://storage.example.com/k?X-Goog-Signature={HEX}", f"https://h.test/cb?access_token={MIXED}&x=1",
    "https://me:hunter2x@example.org/x", "postgresql+psycopg://me:hunter2x@db/x", "redis://:s3cr3tpw@cache:6379/0",
    f"https://oauth2:{MIXED}@gitlab.example.org/a/b.git",
    # options of commands
    f"tool --token {MIXED}", f"tool --token={MIXED}", f"tool --api-key {MIXED}", f"vllm serve m --api-key={MIXED}",
    f"tool --hf-token {MIXED}", "mysql --password=hunter2hunter", f"tool --client-secret {MIXED}",
    # assignments
    f"export HF_TOKEN={MIXED}", f"WANDB_API_KEY='{MIXED}' python x.py", f'api_key = "{MIXED}"', f'"api_key": "{MIXED}"',
    f"password: {MIXED}", f"client_secret: {MIXED}", f"token = {MIXED}", f"AWS_SECRET_ACCESS_KEY={MIXED}",
    f"GH_PAT={MIXED}",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={MIXED}{MIXED}==",
    # keys as services begin them
    f"hf_{MIXED}{MIXED}", f"sk-proj-{MIXED}", f"sk-ant-api03-{MIXED}", f"ghp_{MIXED}{MIXED}", f"glpat-{MIXED}",
    "xoxb-" + "123456789012-abcdefGHIJKL", "AKIA" + "IOSFODNN7EXAMPLE",
    "AIza" + f"{MIXED}{MIXED}"[:35], f"nvapi-{MIXED}{MIXED}",
    f"gsk_{MIXED}{MIXED}", f"r8_{MIXED}{MIXED}", f"tgp_v1_{MIXED}{MIXED}", f"npm_{MIXED}{MIXED}", f"sk_live_{MIXED}",
    f"SG.{MIXED[:22]}.{MIXED}{MIXED}", f"dapi{HEX[:32]}", f"hvs.{MIXED}", f"ya29.{MIXED}",
    f"AGE-SECRET-KEY-1{MIXED.upper()}{MIXED.upper()}", f"ATATT3{MIXED}", f"tskey-auth-{MIXED}",
    # commands and files of theirs; JSON within JSON
    f"curl -u me:{MIXED} https://h.test", f"machine h.test login me password {MIXED}", f"sshpass -p '{MIXED}' ssh h",
    f"git clone https://{MIXED}@h.test/a.git", rf'{{\"api_key\": \"{MIXED}\"}}',
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nb3BlbnNzaC1rZXk\n-----END PGP PRIVATE KEY BLOCK-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
]  # fmt: skip
NONE = [
    "API_KEY=your_key_here", "API_KEY=<your key>", "export HF_TOKEN=$TOKEN", "export HF_TOKEN=${HF_TOKEN:-}",
    "api_key: EMPTY",
    "--token $HF_TOKEN", "api_key=xxxxxxxxxxxx", "password=changeme", "set OPENAI_API_KEY=sk-...",
    "API_KEY=YOUR_API_KEY",
    "Authorization: Bearer <token>", "Bearer YOUR_TOKEN", "https://user:<password>@host", "https://user:$PASS@host",
    "pad_token: '<|endoftext|>'", "eos_token=<|im_end|>", "pad_token: PAD0token12", "the token budget is 16384 tokens",
    "tokens per second: 12345.678", "max_tokens=16384000", "secret santa: buy presents", "password: required",
    "a cookie: chocolate chip", "basic algebra and a token of thanks", "key=value pairs",
    "see https://example.org/a?id=12345678",
    "sha256:" + HEX, "commit 26c4429e1b2d3f4a5b6c7d8e9f0a1b2c3d4e5f6a", "org/model-7B-Instruct-v0.3",
    "sk-learn is a library",
    "https://node7:8000/v1", "me@example.org:22", "ssh://git@example.org:22/a.git", "token_level_loss: true",
    "What is the secret: x in {1, 2, 3}?", "credentials: none", "tokenizer: Qwen/Qwen2.5-0.5B-Instruct",
    "--token-budget 12345678", "seconds_per_token: 0.01234567", "reward_per_token=1.234567e-05",
    "docker run --user nobody:nogroup -u 1000:1000 x", "https://node7.example.org/@somebody",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_a_secret_is_seen_in_any_form(text: str) -> None:
    assert [*secrets_in({"note": f"x {text}"}, "")], "a config with it is refused"
    said = redacted(f"failed: {text} (401)")
    for secret in (
        MIXED,
        MIXED.upper(),
        "hunter2",
        HEX,
        "s3cr3tpw",
        "dXNlcjpodW50ZXIyMg",
        "IOSFODNN7EXAMPLE",
        "123456789012",
        "b3BlbnNz",
    ):
        assert secret not in said, "what is written down is without it"
    assert said.startswith("failed: ")


@pytest.mark.parametrize("text", NONE)
def test_what_only_looks_like_a_secret_is_none(text: str) -> None:
    assert [*secrets_by_form(text)] == []
    assert [*secrets_in({"note": text}, "")] == []
    assert redacted(text) == text


@pytest.mark.parametrize(
    "key", ["token", "secret", "cookie", "authorization", "wandb.api_key", "hf_token", "client_secret"]
)
def test_the_text_under_a_key_for_secrets_is_one(key: str) -> None:
    assert [*secrets_in({key: "correct horse battery"}, "")]
    assert not [*secrets_in({key: "your_key_here"}, "")]


@pytest.mark.parametrize(
    "key", ["per_token_price", "pad_token", "eos_token", "stop_token", "token_level", "tokens", "key", "cookies_eaten"]
)
def test_a_key_that_only_sounds_like_it_is_none(key: str) -> None:
    assert not [*secrets_in({key: "<|endoftext|> and more"}, "")]


def test_a_secret_too_long_for_a_path_is_seen() -> None:
    assert [*secrets_in({"api_key": MIXED * 20}, "")]


def test_no_config_of_ours_holds_a_secret() -> None:
    files = [
        *ROOT.glob("examples/**/*.yaml"),
        *ROOT.glob("toolkits/**/templates/*.yaml"),
        *ROOT.glob("plugins/**/*.yaml"),
    ]
    assert len(files) > 20
    for file in files:
        assert [*secrets_in({"text": file.read_text()}, "")] == [], file


def test_a_long_text_is_read_in_no_time_that_counts() -> None:
    text = "token=" * 20_000 + "key: " * 20_000 + "a" * 200_000 + "Bearer " * 20_000 + "sk-" * 20_000
    assert json.dumps(redacted(text))


def test_a_config_says_where_it_holds_one() -> None:
    data = {"algorithm": "sft", "model": "org/model", "data": "arithmetic"}
    changes = {"launcher": "ray", "env_vars": {"TARGET": f"https://h.test/?sig={MIXED}"}}
    (problem,) = secret_problems(load_config({**data, "cluster": changes}), Path())
    assert problem.path == "cluster.env_vars.TARGET"
    assert MIXED not in f"{problem.message} {problem.fix}"
