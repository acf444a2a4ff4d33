"""How many files of ours somebody loads, and reads, who begins at one of them: DESIGN, section 2."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LOADED = """
import sys
import {module}
paths = [getattr(each, "__file__", None) or "" for name, each in sys.modules.items() if name.startswith("nemorl")]
print(sum(not path.endswith("__init__.py") for path in paths if path))
"""

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("module", "most"), [("nemorl_grpo.config", 60), ("nemorl_grpo.trainer", 135)])
def test_few_files_are_loaded(module: str, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= most


def test_few_files_hold_less_than_a_screen() -> None:
    """A file of 50 lines is a door with little behind it. Variants (losses, samplers, …) are meant to be small."""
    folders = "variants|curriculum|dpo|kto|orpo|simpo|rm|loggers|transports|scaffold"
    variants = re.compile(rf"/({folders})/|/(\w*loss\w*|opsd|sdft|sdpo)\.py$")
    parts = ("core", "toolkits/*", "nemorl-*", "plugins/*")
    sources = [path for part in parts for path in ROOT.glob(f"{part}/src/**/*.py")]
    kept = [path for path in sources if path.name != "__init__.py" and not variants.search(path.as_posix())]
    small = [path.name for path in kept if len(path.read_text().splitlines()) <= 50]
    assert len(small) < 40, sorted(small)
