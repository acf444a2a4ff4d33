"""What a run directory says about a remote run: its id, so that a resumed run continues it, and its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import loading, replace_text
from nemorl.base.text.yaml_text import parse_yaml


def saved_id(run_dir: Path, service: str) -> str | None:
    """The id stored by :func:`save_id`, or None in a fresh run directory."""
    return _text(_path(run_dir, service)).strip() or None


def save_id(run_dir: Path, service: str, run_id: str) -> None:
    """Remember the id for the next time."""
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_text(_path(run_dir, service), run_id + "\n")


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config of the run; empty before it is written."""
    return parse_yaml(_text(run_dir / "config.yaml")) or {}


def _text(path: Path) -> str:
    """Of a file; empty where there is none."""
    with loading(path):
        return path.read_text(encoding="utf-8") if path.is_file() else ""


def _path(run_dir: Path, service: str) -> Path:
    return run_dir / f"{service}-run-id"
