"""How many files of ours somebody loads, and reads, who begins at one of them: DESIGN, section 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = """
import sys
import {module}
paths = [getattr(each, "__file__", None) or "" for name, each in sys.modules.items() if name.startswith("nemorl")]
print(sum(not path.endswith("__init__.py") for path in paths if path))
"""


@pytest.mark.parametrize(("module", "most"), [("nemorl_grpo.config", 60), ("nemorl_grpo.trainer", 135)])
def test_few_files_are_loaded(module: str, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= most
