"""Writes the tables of ``docs/results/migration.md``: which configs of NeMo RL load here, by what they train.

    python docs/count_migration.py Aug=FOLDER Jan=FOLDER all=FOLDER

Each folder is a tree of configs; the last one has all of the repository (``git archive COMMIT examples research``), the
others are those that the project was given. Their names are the heads of columns. Nothing is downloaded.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemorl_compat import legacy_yaml
from nemorl_compat.migration_tree import Entry, migrate_tree
from nemorl_compat.old_config import FAMILIES, OldConfig

PAGE = Path(__file__).resolve().parent / "results" / "migration.md"
PART = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FRAGMENTS, ALL = "fragments", "**all**"
VERDICTS = {"loads": "loads", "missing feature": "names a feature", "refused": "refused"}

Counted = Mapping[str, Sequence[tuple[str, Entry]]]
"""By the name of a tree: each config's family, and what became of it."""


def counted(trees: Mapping[str, Path]) -> Counted:
    """Every config of the trees, migrated."""
    return {name: [(_family(entry, folder), entry) for entry in migrate_tree(folder)] for name, folder in trees.items()}


def _family(entry: Entry, folder: Path) -> str:
    if entry.verdict == "fragment":
        return FRAGMENTS
    return OldConfig(legacy_yaml.read(folder / entry.path, {})).section


def families(found: Counted) -> str:
    """The table of what loads."""
    heads = [f"{tree} files | " + " | ".join(VERDICTS.values()) for tree in found]
    width = 1 + len(found) * (1 + len(VERDICTS))
    lines = [f"| family | {' | '.join(heads)} |", "|" + "---|" * width]
    for family in (*FAMILIES, FRAGMENTS, ALL):
        cells = [family]
        for entries in found.values():
            verdicts: Counter[str] = Counter(entry.verdict for name, entry in entries if family in (name, ALL))
            cells += [str(verdicts.total()), *(str(verdicts[verdict]) for verdict in VERDICTS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def features(found: Counted) -> str:
    """The table of what is missing, the most frequent first."""
    *given, whole = found.values()
    some, every = _missing([pair for entries in given for pair in entries]), _missing(whole)
    sizes = sum(len(entries) for entries in given), len(whole)
    lines = [f"| feature | of the {sizes[0]} files | of all {sizes[1]} |", "|---|---|---|"]
    order = sorted(every | some, key=lambda name: (-some[name], -every[name], name))
    return "\n".join([*lines, *(f"| {name} | {some[name]} | {every[name]} |" for name in order)]) + "\n"


def _missing(entries: Sequence[tuple[str, Entry]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for _, entry in entries:
        if entry.migration is not None and entry.verdict == "missing feature":
            found.update(entry.migration.features)
    return found


def main(arguments: Sequence[str]) -> str | None:
    """Fill in the page; the mistake in the arguments, if there is one."""
    trees = {name: Path(folder) for name, _, folder in (argument.partition("=") for argument in arguments)}
    if len(trees) < 2 or not all(folder.is_dir() for folder in trees.values()):
        return __doc__
    found = counted(trees)
    tables = {"families": families(found), "features": features(found)}
    text = PAGE.read_text("utf-8")
    PAGE.write_text(PART.sub(lambda part: f"{part[1]}\n{tables[part['name']]}\n{part[3]}", text), "utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
