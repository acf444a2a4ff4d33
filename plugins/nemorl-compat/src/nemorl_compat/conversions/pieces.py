"""The yield of conversions: values of the new config by dotted path, and what they found missing or different."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_compat.key_table import Outcome, rows
from nemorl_compat.old_config import OldConfig


class Pieces:
    """A config in the making."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.findings: dict[str, Outcome] = {}
        """Old key -> what a conversion found about it, which goes before what the table says"""

    def put(self, path: str, value: Any) -> None:
        """Give the new config a value; ``None`` is one."""
        self.values[path] = value

    def put_given(self, path: str, value: Any) -> None:
        """The same, where the old config has one."""
        if value is not None:
            self.put(path, value)

    def miss(self, key: str, feature: str) -> None:
        """An old key asks for what nemorl has not."""
        self.findings.setdefault(key, Outcome("missing", feature))

    def differ(self, key: str, sentence: str) -> None:
        """An old key means something else here."""
        self.findings.setdefault(key, Outcome("different", sentence))


def put_mapped(old: OldConfig, new: Pieces, judged: Mapping[str, Outcome]) -> None:
    """Values that only have another name, and NeMo RL's defaults of those that are absent."""
    for row in rows(old.family):
        if row.to is None or row.part is not None:
            continue
        for key in row.keys:
            if key in judged and judged[key].kind == "mapped" and judged[key].to == row.to:
                new.put(row.to, old.leaves[key])
            elif row.has_default and not old.has(key) and row.to not in new.values:
                outcome = row.judge(key, row.default, old)
                if outcome is not None and outcome.kind == "mapped":
                    new.put(row.to, row.default)
