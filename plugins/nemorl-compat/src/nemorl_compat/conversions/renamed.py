"""Values that a new config has under another name and that are otherwise the same."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.key_table import Outcome, rows
from nemorl_compat.old_config import OldConfig


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
