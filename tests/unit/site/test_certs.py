"""Certificates, and what refuses to go beyond this machine without them."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from command_line import Command
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from nemorl.config import ClusterConfig, load_config
from nemorl.errors import ConfigError, UsageError
from nemorl_agents.gateway.gateway import Gateway, GatewayOptions
from nemorl_agents.servers.config import ServerConfig
from nemorl_agents.servers.connection import Connection, GoneError
from nemorl_trust import authority
from nemorl_trust.encryption import (
    is_loopback,
    names_loopback,
    plaintext_problem,
    require_certificate,
    require_safe_listening,
)
from nemorl_trust.ray_security import ray_problems
from recorded_messages import Raises

Policy = Callable[..., Path]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "certs"
    authority.make(folder, ["node7,10.0.0.7", "node8"], days=30)
    return folder


def test_certificates_say_for_whom_and_until_when(certs: Path, nemorl: Command) -> None:
    found = {Path(one["path"]).stem: one for one in nemorl("certs", "show", certs, "--json").json}
    assert found["node7"]["names"] == ["node7", "10.0.0.7", "localhost", "127.0.0.1", "::1"]
    assert (found["node7"]["days_left"], found["ca"]["is_authority"], found["node8"]["is_authority"]) == (
        29,
        True,
        False,
    )
    assert nemorl("certs", "show", certs / "node7.pem", "--soon", "60").code == 1
    for name in ("ca", "node7", "node8"):
        assert (certs / f"{name}.key").stat().st_mode & 0o777 == 0o600


def test_openssl_accepts_them(certs: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    for purpose in ("sslserver", "sslclient"):
        command = [openssl, "verify", "-x509_strict", "-purpose", purpose, "-CAfile", certs / "ca.pem"]
        done = subprocess.run(
            [*command, "-verify_ip", "10.0.0.7", certs / "node7.pem"], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        done = subprocess.run(
            [*command, "-verify_ip", "10.0.0.8", certs / "node7.pem"], capture_output=True, check=False
        )
        assert done.returncode != 0, "it is another machine's"


@pytest.mark.slow
def test_renewing_replaces_key_and_certificate_and_keeps_the_names(
    certs: Path, tmp_path: Path, nemorl: Command
) -> None:
    folder = tmp_path / "certs"
    shutil.copytree(certs, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert nemorl("certs", "renew", folder, "--within", "7").out == "nothing to renew\n"
    assert nemorl("certs", "renew", folder, "--days", "60").code == 0
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"node7.pem", "node7.key", "node8.pem", "node8.key"}
    found = {one.path.stem: one for one in authority.read(folder)}
    assert found["node7"].names == ("node7", "10.0.0.7", *authority.LOOPBACK)
    assert found["node7"].days_left == 59


def test_a_certificate_never_outlives_its_authority(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "CA_DAYS", 10)
    authority.make(tmp_path / "short", ["a"], days=300)
    found = {one.path.stem: one.expires for one in authority.read(tmp_path / "short")}
    assert found["a"] <= found["ca"] < datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=11)


def test_ray_is_told_of_this_machines_certificate(certs: Path, nemorl: Command, tmp_path: Path) -> None:
    own = tmp_path / "it's mine"  # a shell reads what is printed
    own.mkdir()
    for name in ("ca.pem", "node8.pem", "node8.key"):
        shutil.copy(certs / name, own)
    script = nemorl("certs", "ray", own).out + 'echo "$RAY_USE_TLS $RAY_AUTH_MODE $RAY_TLS_SERVER_KEY"'
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == f"1 token {own}/node8.key\n"
    assert nemorl("certs", "ray", certs).code == 2, "it holds two with keys, and neither under this machine's name"


@pytest.mark.parametrize("hosts", [["../x"], ["a/b"], ["ca"], ["node7"], [""], ["a,,b"]])
def test_what_is_no_host_or_has_a_certificate_is_refused(certs: Path, hosts: list[str], raises: Raises) -> None:
    with raises(UsageError):
        authority.make(certs, hosts, days=1)


# TLS, spoken by OpenSSL


def test_a_gateway_with_a_certificate_is_reached_by_https_alone(certs: Path) -> None:
    options = GatewayOptions(tls_certificate=certs / "node7.pem", tls_key=certs / "node7.key")
    with Gateway(options) as gateway:
        assert gateway.address.startswith("https://127.0.0.1:")
        url = f"{gateway.address}/healthz"
        trusting = ssl.create_default_context(cafile=certs / "ca.pem")
        assert httpx.get(url, verify=trusting, trust_env=False).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url, trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"), trust_env=False)


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_a_client_of_engines_trusts_the_authority_that_it_is_given_and_no_other(certs: Path, scheme: str) -> None:
    async def asked(url: str, authority: Path | None) -> Any:
        connection = Connection(url, ServerConfig(urls=[url], tls_ca=authority), "x")
        try:
            return await connection.get("/healthz")
        finally:
            await connection.close()

    options = GatewayOptions(tls_certificate=certs / "node7.pem", tls_key=certs / "node7.key")
    with Gateway(options) as gateway:
        url = gateway.address.replace("https", scheme)
        assert asyncio.run(asked(url, certs / "ca.pem")) == {"status": "ok"}
        with pytest.raises(GoneError, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(asked(url, None))


def test_a_key_of_another_certificate_is_refused_at_once(certs: Path, raises: Raises) -> None:
    with raises(UsageError, "node7.pem", varies=r"\[[^)]*\)|\[.*\].*"):
        Gateway(GatewayOptions(tls_certificate=certs / "node7.pem", tls_key=certs / "node8.key"))
    with raises(UsageError, "certificate"):
        Gateway(GatewayOptions(tls_certificate=certs / "node7.pem"))


# Beyond this machine


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("127.1", True),  # a short form of 127.0.0.1
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("0", False),  # a short form of 0.0.0.0
        ("192.0.2.1", False),
        ("::ffff:0.0.0.0", False),
    ],
)
def test_only_this_machines_own_address_is_one(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


@pytest.mark.parametrize(
    ("url", "is_own"),
    [
        ("http://127.0.0.1:8", True),
        ("http://localhost", True),
        ("http://[::1]:8", True),
        ("http://localhost.example.org", False),
        ("http://127.0.0.1.example.org", False),
        ("http://127.0.0.1@node7:8", False),
        ("http://node7:8", False),
    ],
)
def test_a_url_of_another_machine_is_told_apart(url: str, is_own: bool) -> None:
    assert names_loopback(url) is is_own


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "0"])
def test_a_gateway_refuses_to_listen_beyond_this_machine_without_encryption(host: str, raises: Raises) -> None:
    with raises(UsageError, "encryption"):
        Gateway(GatewayOptions(host=host))


def test_view_refuses_other_machines_without_encryption(tmp_path: Path, nemorl: Command) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    done = nemorl("view", tmp_path, "--host", "0.0.0.0", "--no-browser")
    assert done.code == 2
    assert "nemorl view would listen on '0.0.0.0', beyond this machine, without encryption" in done.err


def test_serve_refuses_other_machines_before_anything_is_loaded(tiny_model: Path, nemorl: Command) -> None:
    done = nemorl("serve", tiny_model, "--host", "0.0.0.0")
    assert done.code == 2
    assert "without encryption" in done.err


def test_a_key_that_can_be_guessed_lets_nobody_else_in(raises: Raises) -> None:
    for key in (None, "x" * 16):
        require_safe_listening("it", "0.0.0.0", encrypted=True, key=key, plaintext=False)
    require_safe_listening("it", "127.0.0.1", encrypted=False, key="short", plaintext=False)
    with raises(UsageError, 15):
        require_safe_listening("it", "0.0.0.0", encrypted=True, key="x" * 15, plaintext=False)


def test_the_site_decides_whether_plain_text_can_be_unlocked(policy: Policy, raises: Raises) -> None:
    require_safe_listening("it", "0.0.0.0", encrypted=False, key=None, plaintext=True)
    policy("contact: ml@example.org\nrules: [{name: encrypt, deny: {unlock: [plaintext]}}]")
    with raises(UsageError, "encrypt", "ml@example.org", varies=r"\S+(?= may not)"):
        require_safe_listening("it", "0.0.0.0", encrypted=False, key=None, plaintext=True)


def test_servers_on_other_machines_are_asked_over_https(certs: Path) -> None:
    def problems(**options: Any) -> list[str]:
        backend = {"name": "server", **options}
        run = {"algorithm": "grpo", "model": "m", "data": "arithmetic", "environment": "math"}
        try:
            load_config({**run, "generation": {"backend": backend}})
        except ConfigError as error:
            return [problem.path for problem in error.problems]
        return []

    assert problems(urls=["https://node7:8000"], tls_ca=str(certs / "ca.pem")) == []
    assert problems(urls=["http://127.0.0.1:8000", "http://localhost:8001"]) == []
    assert problems(urls=["https://node7:8000", "http://node8:8000"]) == ["generation.backend.urls.1"]
    assert problems(urls=["http://node8:8000"], plaintext=True) == []


def test_a_ray_cluster_beyond_this_machine_is_joined_with_a_certificate_that_holds(
    certs: Path, tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "RAY_USE_TLS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def asked(security: dict[str, Any], address: str = "10.0.0.7:6379") -> tuple[int, int]:
        warnings: list[str] = []
        cluster = ClusterConfig(launcher="ray", address=address, security={"token_auth": True, **security})
        run: Any = SimpleNamespace(cluster=cluster)
        return len([*ray_problems(run, Path(), warnings.append)]), len(warnings)

    def files(folder: Path) -> dict[str, Path]:
        names = {"tls_certificate": "node7.pem", "tls_key": "node7.key", "tls_ca": "ca.pem"}
        return {field: folder / name for field, name in names.items()}

    assert [*ray_problems(SimpleNamespace(cluster=ClusterConfig(launcher="ray")), Path(), print)] == []  # type: ignore[arg-type]
    assert asked({}, "127.0.0.1:6379") == asked(files(certs)) == asked({"plaintext": True}) == (0, 0)
    assert asked({}) == (1, 0)
    policy("rules: [{deny: {unlock: [plaintext]}}]")
    assert (asked({"plaintext": True}), asked(files(certs))) == ((1, 0), (0, 0))
    authority.make(tmp_path / "nemorl" / "certs", ["node7"], days=3)
    assert asked({}) == (0, 1), "found by itself, and ends soon"
    monkeypatch.setattr(authority, "EARLIER", datetime.timedelta(days=9))
    authority.make(tmp_path / "late", ["node7"], days=-2)
    assert asked(files(tmp_path / "late")) == (1, 0), "it has ended"


def test_a_certificate_of_the_environment_that_is_gone_is_a_problem_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / "gone.pem"))
    cluster = ClusterConfig(launcher="ray", address="10.0.0.7:6379", security={"token_auth": True})
    (problem,) = ray_problems(SimpleNamespace(cluster=cluster), Path(), print)  # type: ignore[arg-type]
    assert "gone.pem is no PEM certificate" in problem.message


def test_an_authority_that_has_ended_signs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr(authority, "CA_DAYS", 0)
    with raises(UsageError):
        authority.make(tmp_path / "certs", ["node7"], days=30)


@pytest.mark.parametrize("url", ["http://[::1", "http://[10.0.0.7]:80"])
def test_what_is_no_url_leads_to_another_machine(url: str) -> None:
    assert not names_loopback(url)
    problem = plaintext_problem(url)
    assert problem is not None
    assert "unencrypted" in problem[0]


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(certs: Path, tmp_path: Path) -> None:
    key = load_pem_private_key((certs / "node7.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(UsageError, match="passphrase"):
        require_certificate("it", certs / "node7.pem", tmp_path / "locked.key")
