"""A site's policy for the length of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nemorl.base.packages.plugin_policy import machine_policy
from nemorl.plugins import Index, Registry
from nemorl_testing.plugin import use_registry
from nemorl_trust import site_policy

Policy = Callable[..., Path]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    """Writes a policy file; ``etc=True``: the one that no variable can move."""
    monkeypatch.setattr(site_policy, "SITE_FILE", tmp_path / "etc" / "policy.yaml")
    monkeypatch.delenv("NEMORL_SITE_POLICY", raising=False)
    changed = pytest.MonkeyPatch()

    def forget() -> None:
        site_policy.site_policies.cache_clear()
        machine_policy.cache_clear()

    def write(text: str, *, etc: bool = False) -> Path:
        file = site_policy.SITE_FILE if etc else tmp_path / "policy.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        if etc:
            # On a machine these are root's; here, whose tests they are.
            changed.setattr(site_policy, "_doubt", lambda path, owners: None)
        else:
            monkeypatch.setenv("NEMORL_SITE_POLICY", str(file))
        forget()
        return file

    forget()
    with use_registry(Registry(Index.installed())):
        yield write
    changed.undo()
    forget()
