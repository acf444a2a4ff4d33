"""Which certificates and which token a Ray cluster gets, and where a run is refused without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from nemorl.config.cluster import SecurityConfig
from nemorl.errors import UsageError
from nemorl_trust import ray_security
from nemorl_trust.ray_security import own_certificate, ray_address, ray_variables
from recorded_messages import Raises

BEYOND = "10.0.0.7:6379"
TOKEN = {"RAY_AUTH_MODE": "token"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with neither certificates nor a token, on the machine ``node7``."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_security.socket, "gethostname", lambda: "node7.example.org")
    return tmp_path


@pytest.fixture
def certificates(home: Path) -> Callable[..., Path]:
    """Puts files of those names where this user's certificates are."""

    def write(*names: str) -> Path:
        folder = home / "config" / "nemorl" / "certs"
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).touch()
        return folder

    return write


def test_a_private_cluster_has_a_token_of_its_own_and_needs_no_certificate() -> None:
    first, second = ray_variables(SecurityConfig(), None), ray_variables(SecurityConfig(), None)
    assert first.keys() == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first != second


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "127.8.8.8:1", "localhost:6379", "[::1]:6379"])
def test_a_cluster_on_this_machines_loopback_needs_neither(address: str) -> None:
    assert ray_variables(SecurityConfig(), address) == {}


@pytest.mark.parametrize("address", [BEYOND, "node8:6379", "ray://node8:10001", "localhost.example.org:6379"])
def test_beyond_this_machine_nothing_is_sent_without_a_certificate(address: str, raises: Raises) -> None:
    with raises(UsageError, address, "plaintext", varies=r"/\S+"):
        ray_variables(SecurityConfig(token_auth=False), address)


def test_beyond_this_machine_somebody_without_a_token_is_refused(
    certificates: Callable[..., Path], home: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    certificates("ca.pem", "node7.pem", "node7.key")
    with raises(UsageError, BEYOND, "token"):
        ray_variables(SecurityConfig(), BEYOND)
    assert ray_variables(SecurityConfig(token_auth=False), BEYOND)["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # who started the cluster says so
    assert "RAY_AUTH_MODE" not in ray_variables(SecurityConfig(), BEYOND)
    monkeypatch.delenv("RAY_AUTH_MODE")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("a" * 64)
    found = ray_variables(SecurityConfig(), BEYOND)
    assert TOKEN.items() <= found.items()
    assert "RAY_AUTH_TOKEN" not in found, "Ray reads its own file"


def test_certificates_in_the_folder_of_the_user_are_used_by_themselves(certificates: Callable[..., Path]) -> None:
    folder = certificates("ca.pem", "node7.pem", "node7.key", "node8.pem", "node8.key")
    found = ray_variables(SecurityConfig(token_auth=True), BEYOND)
    assert found == {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": f"{folder}/node7.pem",
        "RAY_TLS_SERVER_KEY": f"{folder}/node7.key",
        "RAY_TLS_CA_CERT": f"{folder}/ca.pem",
        **TOKEN,
    }
    assert ray_variables(SecurityConfig(token_auth=True, plaintext=True), BEYOND) == TOKEN, "the cluster has none"


def test_which_certificate_is_this_machines(certificates: Callable[..., Path]) -> None:
    folder = certificates("ca.pem", "a.pem", "a.key", "b.pem")
    assert own_certificate(folder)["RAY_TLS_SERVER_CERT"].endswith("/a.pem"), "the only one with a key"
    certificates("b.key")
    assert own_certificate(folder) == {}, "either may be meant"
    certificates("node7.example.org.pem", "node7.example.org.key")
    assert own_certificate(folder)["RAY_TLS_SERVER_CERT"].endswith("/node7.example.org.pem")
    (folder / "ca.pem").unlink()
    assert own_certificate(folder) == {}, "nobody could be checked"


def test_what_the_environment_says_holds(monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert ray_variables(SecurityConfig(), BEYOND) == {}
    monkeypatch.setenv("RAY_USE_TLS", "0")
    with raises(UsageError, BEYOND, varies=r"/\S+"):
        ray_variables(SecurityConfig(), BEYOND)


def test_plain_text_and_a_certificate_exclude_each_other(tmp_path: Path, raises: Raises) -> None:
    (tmp_path / "a").touch()
    files = dict.fromkeys(("tls_certificate", "tls_key", "tls_ca"), tmp_path / "a")
    with raises(ValueError, "tls_certificate"):
        SecurityConfig(plaintext=True, **files)


def test_auto_is_the_cluster_that_this_user_or_root_started(
    home: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    assert ray_address("node7") == "node7:6379"
    with raises(UsageError, "ray_current_cluster", varies=r"/\S+(?=/ray/)"):
        ray_address("auto")
    (home / "ray").mkdir()
    (home / "ray" / "ray_current_cluster").write_text(f"{BEYOND}\n")
    assert ray_address("auto") == BEYOND
    if os.geteuid() == 0:
        os.chown(home / "ray" / "ray_current_cluster", 54321, -1)
    monkeypatch.setattr(ray_security.os, "getuid", lambda: 12345)
    with raises(UsageError, "ray_current_cluster", varies=r"/\S+(?=/ray/)|\(\d+\)"):
        ray_address("auto")
    monkeypatch.setenv("RAY_ADDRESS", "node9:1")
    assert ray_address("auto") == "node9:1"
