"""Signed sets of plugins: what was signed is admitted, and whatever differs is named."""

from __future__ import annotations

import base64
import json
import os
import py_compile
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from installed_plugins import Install
from nemorl.config import load_config
from nemorl.errors import UsageError
from nemorl.plugins import Index, Registry
from nemorl_testing.plugin import use_registry
from nemorl_trust.signatures import read_set
from nemorl_trust.signed_json import read_public_key
from nemorl_trust.site_check import site_problems
from recorded_messages import Raises

Policy = Callable[..., Path]
NAME = "acme-env"


@pytest.fixture
def signed(tmp_path: Path, site: Path, install: Install, nemorl: Command) -> Iterator[Path]:
    """A set with one plugin, signed by ``site.key``."""
    install(NAME, {NAME: "acme_env:Env"})
    with use_registry(Registry(Index.installed())):
        done = nemorl("plugins", "sign", tmp_path / "set.json", NAME, "--new-key", tmp_path / "site.key")
        assert done.code == 0, done.err
        yield tmp_path / "set.json"


def differences(nemorl: Command, signed: Path) -> list[str]:
    with use_registry(Registry(Index.installed())):
        done = nemorl("plugins", "verify", signed, "--key", signed.with_name("site.key.pub"), "--json")
        assert done.code == int(not done.json["ok"])
        found: list[str] = done.json["problems"]
    return found


@pytest.mark.slow
def test_what_was_signed_is_as_it_was(signed: Path, nemorl: Command) -> None:
    assert differences(nemorl, signed) == []
    assert signed.with_name("site.key").stat().st_mode & 0o777 == 0o600


def test_the_signature_is_checked_by_another_library_call(signed: Path) -> None:
    found = json.loads(signed.read_text())
    key: Any = load_pem_public_key(signed.with_name("site.key.pub").read_bytes())
    content = json.dumps(found["plugins"], sort_keys=True, separators=(",", ":"))
    key.verify(base64.b64decode(found["signature"]), b"nemorl plugin set 1\n" + content.encode())
    (plugin,) = found["plugins"]
    assert (plugin["distribution"], plugin["version"]) == (NAME, "1.2")
    assert {"acme_env.py", "acme_env-1.2.dist-info/METADATA"} <= plugin["files"].keys()


# Attacks on the files


def edit(site: Path) -> None:
    (site / "acme_env.py").write_text((site / "acme_env.py").read_text() + "import os\n")


def edit_and_keep_the_time(site: Path) -> None:
    file = site / "acme_env.py"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes().replace(b"made up", b"madeup!"))  # as long as before
    os.utime(file, ns=times)


def link_elsewhere(site: Path) -> None:
    shutil.copy(site / "acme_env.py", site.parent / "elsewhere.py")
    (site.parent / "elsewhere.py").write_text("import os\n")
    (site / "acme_env.py").unlink()
    (site / "acme_env.py").symlink_to(site.parent / "elsewhere.py")


def another_entry_point(site: Path) -> None:
    file = next(site.glob("acme_env-*")) / "entry_points.txt"
    file.write_text(file.read_text() + "more = acme_env:Env\n")


def plant_bytecode(site: Path) -> None:
    source, evil = site / "acme_env.py", site.parent / "evil.py"
    evil.write_text("raise SystemExit\n")
    compiled = Path(py_compile.compile(str(source)) or "")
    planted = bytearray(Path(py_compile.compile(str(evil), cfile=str(site.parent / "evil.pyc")) or "").read_bytes())
    planted[:16] = compiled.read_bytes()[:16]  # the head of the right one: Python takes it
    compiled.write_bytes(bytes(planted))


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (edit, "acme-env 1.2: acme_env.py was changed"),
        (edit_and_keep_the_time, "acme-env 1.2: acme_env.py was changed"),
        (link_elsewhere, "acme-env 1.2: acme_env.py was changed"),
        (another_entry_point, "acme-env 1.2: acme_env-1.2.dist-info/entry_points.txt was changed"),
        (plant_bytecode, "does not come from the source beside it"),
        (lambda site: (site / "acme_env.py").unlink(), "acme-env 1.2: acme_env.py is missing"),
        (lambda site: next(site.glob("acme_env-*")).joinpath("METADATA").unlink(), "acme-env is unknown"),
        (lambda site: next(site.glob("acme_env-*")).joinpath("extra").write_text("x"), "extra was added"),
    ],
)
@pytest.mark.slow
def test_a_tampered_file_is_named(
    signed: Path, site: Path, nemorl: Command, attack: Callable[[Path], Any], said: str
) -> None:
    attack(site)
    found = differences(nemorl, signed)
    assert any(said in line for line in found), found


@pytest.mark.slow
def test_another_version_is_named(signed: Path, site: Path, install: Install, nemorl: Command) -> None:
    shutil.rmtree(next(site.glob("acme_env-*")))
    install(NAME, {NAME: "acme_env:Env"}, version="1.3")
    assert differences(nemorl, signed) == ["acme-env is 1.3, and 1.2 was signed"]


# Attacks on the set


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["plugins"][0].update(version="1.3"),
        lambda found: found["plugins"][0]["files"].update({"acme_env.py": "0" * 64}),
        lambda found: found["plugins"].append(found["plugins"][0]),
        lambda found: found["plugins"].clear(),
        lambda found: found.update(signature=base64.b64encode(b"x" * 64).decode()),
        lambda found: found.update(format="nemorl plugin set 0"),
    ],
)
def test_a_changed_set_is_refused(signed: Path, change: Callable[[Any], Any], raises: Raises) -> None:
    found = json.loads(signed.read_text())
    change(found)
    signed.write_text(json.dumps(found))
    with raises(UsageError, "set.json"):
        read_set(signed, [read_public_key(signed.with_name("site.key.pub"))])


@pytest.mark.slow
def test_a_set_of_another_key_is_refused(signed: Path, tmp_path: Path, nemorl: Command) -> None:
    with use_registry(Registry(Index.installed())):
        assert nemorl("plugins", "sign", "--new-key", tmp_path / "other.key").code == 0
        done = nemorl("plugins", "verify", signed, "--key", tmp_path / "other.key.pub")
    assert done.code == 2
    assert "another key signed it" in done.err


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"plugins": 1, "signature": "AA==", "format": "x"}', "\x00"])
def test_a_file_that_is_no_set_is_refused(tmp_path: Path, raises: Raises, text: str) -> None:
    (tmp_path / "set.json").write_text(text)
    with raises(UsageError, "set.json"):
        read_set(tmp_path / "set.json", [])


@pytest.mark.slow
def test_keys_are_never_overwritten(signed: Path, nemorl: Command) -> None:
    before = signed.with_name("site.key").read_bytes()
    assert nemorl("plugins", "sign", "--new-key", signed.with_name("site.key")).code == 2
    assert signed.with_name("site.key").read_bytes() == before


# What a policy demands


def launch_problems(**changes: Any) -> list[str]:
    data = {"algorithm": "sft", "model": "org/model", "data": "arithmetic", **changes}
    return [problem.message for problem in site_problems(load_config(data), Path())]


@pytest.mark.slow
def test_a_policy_admits_what_was_signed_and_refuses_what_was_not(
    tmp_path: Path, signed: Path, policy: Policy, nemorl: Command
) -> None:
    used = ["nemorl-sft", "nemorl-dtensor"]
    key = signed.with_name("site.key")
    demand = "contact: ml@example.org\nsigned_plugins: {{keys: ['{}'], sets: ['{}']}}"
    policy(demand.format(f"{key}.pub", signed))
    with use_registry(Registry(Index.installed())):
        found = launch_problems()
    assert {text.partition(" ")[0] for text in found} >= {*used, "nemorl-core", "nemorl-cli", "nemorl-math-env"}
    assert all("is in no set that was signed (the site demands it)" in text for text in found)
    done = nemorl("generate", "hello", "--model", "org/model")
    assert done.code == 2
    assert "ask ml@example.org" in done.err
    policy(demand.format(f"{key}.pub", tmp_path / "missing.json"))
    assert "is no signed set of plugins" in launch_problems()[0]
    policy(demand.format(signed, signed))
    assert "holds no public key" in launch_problems()[0]
