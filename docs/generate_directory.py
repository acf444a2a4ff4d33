"""Writes the index of this repository's plugins, which comes with nemorl-core, and its table in a page.

    python docs/generate_directory.py            write both
    python docs/generate_directory.py --check    exit 1 if one is not what would be written

It reads the ``pyproject.toml`` of each package and the sources that its entry points name, and imports none of them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from nemorl.plugins import Index
from nemorl.plugins.index import PREFIX
from nemorl_cli.directory.badges import listings_of
from nemorl_cli.directory.indexes import INDEX
from nemorl_cli.directory.listing import Listing, PluginIndex
from nemorl_cli.directory.publishing import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plugin-directory.md"
LISTED = ROOT / "core/src/nemorl/base/packages/plugins.json"
KERNEL = "nemorl-core"
PART = re.compile(r"(?<=<!-- generated: plugins of this repository -->\n).*?(?=<!-- end -->)", re.DOTALL)


class Checkout(metadata.Distribution):
    """A package of this repository, with the metadata that its next installation would have."""

    def __init__(self, project: Mapping[str, Any]) -> None:
        self._project = project

    def read_text(self, filename: str) -> str | None:
        project = self._project
        if filename == "METADATA":
            facts = {
                "Name": "name",
                "Version": "version",
                "Summary": "description",
                "Requires-Python": "requires-python",
            }
            lines = ["Metadata-Version: 2.4", *(f"{fact}: {project[key]}" for fact, key in facts.items())]
            lines += [f"License-Expression: {project['license']}"]
            requires = [
                *project["dependencies"],
                *([f"{KERNEL}=={project['version']}"] if project["name"] == KERNEL else []),
            ]
            return "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires), ""])
        if filename == "entry_points.txt":
            groups = project.get("entry-points", {}).items()
            return "\n".join(
                [line for group, named in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in named.items()))]
            )
        return None

    def locate_file(self, path: Any) -> Path:
        return ROOT / str(path)


def listings() -> list[Listing]:
    """One per package that offers plugins."""
    files = [path for pattern in ("*", "toolkits/*", "plugins/*") for path in ROOT.glob(f"{pattern}/pyproject.toml")]
    projects = [tomllib.loads(path.read_text("utf-8"))["project"] for path in files]
    points = [
        point for project in projects for point in Checkout(project).entry_points if point.group.startswith(PREFIX)
    ]
    return listings_of(Index(points).entries)


def index_text(found: Sequence[Listing]) -> str:
    """A part a line, so that two who add plugins change different lines."""
    index = PluginIndex(name="nemorl", serial=0, plugins=tuple(found))
    content = index.model_dump(mode="json", exclude_none=True)
    return json.dumps({"format": INDEX.name, "index": content}, indent=1, ensure_ascii=False) + "\n"


def texts() -> dict[Path, str]:
    """Both files as they should be."""
    found = listings()
    page = PART.sub(lambda _: f"\n{table(found)}\n", PAGE.read_text("utf-8"))
    return {LISTED: index_text(found), PAGE: page}


if __name__ == "__main__":
    from pages import update

    sys.exit(update(texts()))
