"""Everything on the page "Write your first plugin" is done as it says, in an environment of its own."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl_testing.models import tiny_model as model_with_weights

PAGE = Path(__file__).parents[3] / "docs/first-plugin.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BLOCK = re.compile(r"(?P<before>[^\n]*)\n\n```(?P<language>\w+)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w./-]+)`:$")
TOOLS = ("nemorl", "pytest", "mypy", "pip")
LIMIT_S = 300


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    file: str | None
    """What the text before it says that this is the content of"""


def blocks() -> list[Block]:
    found = []
    for match in BLOCK.finditer(PAGE.read_text()):
        file = FILE.search(match["before"])
        found.append(Block(match["language"], match["code"], file[1] if file else None))
    return found


def test_every_block_is_a_command_a_listing_or_a_file_with_a_name() -> None:
    assert len(blocks()) == PAGE.read_text().count("```") // 2
    for block in blocks():
        assert (block.language in ("bash", "text")) == (block.file is None), block


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell in a fresh virtual environment that sees what is installed here, and no network."""
    pytest.importorskip("editables", reason="editables, which builds `pip install -e`, is not installed")
    home = tmp_path / "venv"
    venv.create(home)  # pip is one of the things that are installed here
    python = home / "bin/python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    places = [path for path in (sysconfig.get_path("purelib"), *site.getsitepackages()) if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({place!r})" for place in dict.fromkeys(places)]
    (Path(purelib) / "installed-here.pth").write_text("\n".join(lines) + "\n")
    for tool in TOOLS:  # as pip would have written them here
        script = home / "bin" / tool
        script.write_text(f'#!/bin/sh\nexec "{python}" -m {tool} "$@"\n')
        script.chmod(0o755)
    (home / "bin/ruff").symlink_to(Path(sysconfig.get_path("scripts")) / "ruff")
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    cache = {"MYPY_CACHE_DIR": str(PAGE.parents[1] / ".mypy_cache/plugins"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **offline, **cache, "PATH": path, "VIRTUAL_ENV": str(home)}


@pytest.mark.slow
@pytest.mark.full
def test_the_page_leads_to_a_plugin_that_trains_and_can_be_published(tmp_path: Path, shell: dict[str, str]) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    for block in blocks():
        code = block.code.replace(MODEL, str(model_with_weights()))
        if block.language == "bash":
            place = run(code, place, shell)
        elif block.language == "text":
            files = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
            assert set(code.split()) == files
        else:
            assert block.file is not None
            (place / block.file).write_text(code)
    steps = [record for record in read_jsonl(place / "runs/near-miss/metrics.jsonl") if "train/reward" in record]
    assert len(steps) == 3
    assert all("train/environment/no_number" in step for step in steps)
    assert [path.name for path in (place / "dist").iterdir()] == ["nemorl_near_miss-0.1.0-py3-none-any.whl"]


def run(commands: str, place: Path, shell: dict[str, str]) -> Path:
    """The commands of a block in a shell; where they leave it."""
    left = place.parent / "left"
    done = subprocess.run(
        ["sh", "-e", "-c", f"{commands}\npwd > '{left}'"],
        cwd=place,
        env=shell,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
    return Path(left.read_text().strip())
