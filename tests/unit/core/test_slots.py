"""Every slot has a type, and what fills it in the packages of this repository is found under its name."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import nemorl.contracts.slots
import nemorl.plugins.slots
import nemorl_media.slots
import nemorl_rl.slots
import pytest
from nemorl.base.packages import site as site_of_machine
from nemorl.base.packages.plugin_policy import machine_policy
from nemorl.contracts.slots import OPEN_DATA, OpenData
from nemorl.errors import UsageError
from nemorl.plugins import registry
from nemorl.plugins.slots import Slot
from nemorl_trust.site import PolicedSite

ROOT = Path(__file__).parents[3]
DECLARING: tuple[ModuleType, ...] = (
    nemorl.plugins.slots,
    nemorl.contracts.slots,
    nemorl_media.slots,
    nemorl_rl.slots,
)


def entries() -> dict[str, str]:
    """What fills slots, of all packages here."""
    found: dict[str, str] = {}
    for path in ROOT.glob("*/*/pyproject.toml"):
        groups = tomllib.loads(path.read_text())["project"].get("entry-points", {})
        found |= groups.get("nemorl.slots", {})
    return found


def declared() -> set[str]:
    return {slot.name for module in DECLARING for slot in vars(module).values() if isinstance(slot, Slot)}


def test_each_slot_is_filled_and_nothing_else_is() -> None:
    filled = {name.partition(".")[0] for name in entries()}
    assert filled - {site_of_machine.NAME} == declared()


@pytest.mark.parametrize("name", sorted(entries()))
def test_what_fills_a_slot_can_be_loaded(name: str) -> None:
    if name != site_of_machine.NAME:
        assert Slot[Any](name).filled() is not None


def test_data_is_opened_with_the_arguments_of_the_contract() -> None:
    opens = OPEN_DATA.filled()
    assert opens is not None
    wanted = [name for name in inspect.signature(OpenData.__call__).parameters if name != "self"]
    assert [*inspect.signature(opens).parameters] == wanted


def test_a_slot_of_a_key_is_a_slot_of_its_own() -> None:
    assert Slot[Any]("config_section").of("launch") == Slot("config_section.launch")
    assert {"launch", "reward_fn"} <= {*registry().index.keys_of("config_section")}


def test_the_kernel_alone_refuses_what_a_policy_was_meant_to_forbid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone = site_of_machine.WithoutTrust()
    monkeypatch.setattr(site_of_machine, "SITE_FILE", tmp_path / "policy.yaml")
    monkeypatch.delenv(site_of_machine.VARIABLE, raising=False)
    assert not alone.has_policy()
    (tmp_path / "policy.yaml").write_text("rules: []\n")
    assert alone.has_policy(), "nobody here can read it"
    monkeypatch.setattr("nemorl.base.packages.plugin_policy.site", lambda: alone)
    machine_policy.cache_clear()
    try:
        assert "nemorl-trust" in str(machine_policy().refusal("nemorl-dtensor"))
    finally:
        machine_policy.cache_clear()
    with pytest.raises(UsageError, match="nemorl-trust"):
        alone.ray_variables(None, None)
    assert isinstance(site_of_machine.site(), PolicedSite)


@pytest.mark.parametrize("points", [b"", b"[nemorl.slots]\nsite = nemorl_trust.gone:site\n", b"[nemorl.slots\n\xff"])
def test_half_of_what_reads_a_policy_is_none_of_it(
    points: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "nemorl_trust-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nemorl-trust\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_bytes(points)
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(site_of_machine.site.__wrapped__(), site_of_machine.WithoutTrust)
