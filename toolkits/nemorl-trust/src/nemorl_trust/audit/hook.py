"""The hook ``audit``: what a run was, what it ran with and how it ended, in the audit log of its user."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from nemorl.base.files.atomic import exported, loading
from nemorl.plugins.hooks import hookimpl

from nemorl_trust.audit.recording import record
from nemorl_trust.lock import FILE, read_lock


class Audit:
    """Entries of one run; ``attempt`` ties together those of one process."""

    essential = True  # where the site demands an audit log, a run that cannot write it ends

    def __init__(self) -> None:
        self._attempt: str | None = None
        self._receipts = {"proven": 0, "unproven": 0}
        """Of the weights that engines were sent"""

    @hookimpl(trylast=True)  # after the record of the plugins
    def on_build_end(self, trainer: Any) -> None:
        config, path = trainer.config, trainer.directory.path
        self._attempt = secrets.token_hex(6)
        with loading(path / "config.yaml"):
            resolved = (path / "config.yaml").read_bytes()
        facts = {
            "algorithm": config.algorithm,
            "model": config.policy.model_name,
            "config_sha256": hashlib.sha256(resolved).hexdigest(),
            "plugins": [
                {"distribution": plugin.distribution, "version": plugin.version, "files_sha256": plugin.files_sha256}
                for plugin in read_lock(path / FILE)
            ],
        }
        self._say(trainer, "run_resumed" if trainer.directory.is_resumed else "run_started", facts)

    def on_weights_proven(self, trainer: Any, step: int, receipt: Mapping[str, Any]) -> None:
        self._receipts["proven" if receipt["is_proven"] else "unproven"] += 1
        if receipt["is_proven"] is False:
            self._say(trainer, "weights_unproven", {"step": step, **receipt})

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: Any) -> None:
        is_complete = trainer.progress.step >= trainer.total_steps
        if is_complete and trainer.config.checkpoint.export:
            self._say(trainer, "weights_exported", exported(trainer.directory.path / "model"))
        facts = {"step": trainer.progress.step, "stopped": None if is_complete else trainer.stop_reason}
        facts |= {"weight_receipts": dict(self._receipts)} if any(self._receipts.values()) else {}
        self._say(trainer, "run_finished", facts)

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        if self._attempt is not None:
            self._say(trainer, "run_failed", {"step": trainer.progress.step, "error": type(error).__name__})

    def _say(self, trainer: Any, event: str, facts: dict[str, Any]) -> None:
        about = {"run": str(trainer.directory.path.resolve()), "attempt": self._attempt}
        record(event, {**about, **facts}, trainer.directory.warn)
