from __future__ import annotations

from pathlib import Path

import pytest
from whole_configs import PROMPTS


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files of prompts that whole configs name."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "prompts").mkdir()
    for name, text in PROMPTS.items():
        (folder / "prompts" / name).write_text(text)
    return folder
