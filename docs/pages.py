"""How the programs ``generate_*.py`` end: pages are written, or with ``--check`` compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def update(wanted: Mapping[Path, str]) -> int:
    """Write the pages that differ; with ``--check`` name them, and what writes them, and return 1."""
    stale = [page for page, text in wanted.items() if not page.is_file() or page.read_text("utf-8") != text]
    is_check = "--check" in sys.argv[1:]
    for page in stale:
        name = page.relative_to(DOCS.parent)
        if is_check:
            print(f"{name} is out of date: run python docs/{Path(sys.argv[0]).name}", file=sys.stderr)
        else:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(wanted[page], encoding="utf-8")
            print(f"wrote {name}")
    return int(is_check and bool(stale))
