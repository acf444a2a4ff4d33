"""What a hook, a logger and a server's list read in a run folder is named where the disk refuses it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nemorl.errors import StorageError
from nemorl_agents.servers.roster import Roster
from nemorl_insight.loggers.run_files import recorded_config, saved_id
from nemorl_trust.audit.hook import Audit
from recorded_messages import Raises


def audited(run: Path) -> None:
    config = SimpleNamespace(algorithm="grpo", policy=SimpleNamespace(model_name="tiny"))
    Audit().on_build_end(SimpleNamespace(config=config, directory=SimpleNamespace(path=run, is_resumed=False)))


READERS = {
    "config.yaml": audited,
    "config.yaml ": recorded_config,
    "wandb-run-id": lambda run: saved_id(run, "wandb"),
    "state.json": lambda run: Roster(run).state(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_the_disk_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, raises: Raises
) -> None:
    def refused(path: Path, *_: object, **__: object) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    read: Callable[[Path], Any] = READERS[name]
    (tmp_path / name.strip()).touch()
    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with raises(StorageError, str(tmp_path / name.strip())):
        read(tmp_path)
