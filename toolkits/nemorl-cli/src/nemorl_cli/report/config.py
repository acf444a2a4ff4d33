"""The plugins of this toolkit."""

from __future__ import annotations

from typing import ClassVar

from nemorl.plugins.kinds import HookConfig


class RecordsConfig(HookConfig):
    """What every run leaves behind beside the kernel's own files. Part of every run, listed or not."""

    summary: ClassVar[str] = "environment.json, plugins.lock.json and report.html of every run"

    def build(self) -> object:
        from nemorl_cli.report.run_files import Records

        return Records()


class AuditConfig(HookConfig):
    """Entries of every run in the audit log of its user. Part of every run, listed or not."""

    summary: ClassVar[str] = "entries of every run in a log that shows when somebody changes it"

    def build(self) -> object:
        from nemorl_trust.audit.hook import Audit

        return Audit()
