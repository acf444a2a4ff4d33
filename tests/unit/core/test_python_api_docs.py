"""The code of the Python pages runs as it stands, but for the model: a tiny one stands in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nemorl.plugins import Index, Registry
from nemorl_testing.models import tiny_model as model_with_weights
from nemorl_testing.plugin import use_registry
from tiers import only

DOCS = Path(__file__).parents[3] / "docs"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", only("evaluation.md", of=("python-api.md", "evaluation.md")))
def test_the_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (nemorl-cli[plot])")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks
    names: dict[str, object] = {"__name__": "__main__"}
    with use_registry(Registry(Index.installed())):
        for number, block in enumerate(blocks):
            code = compile(block.replace(MODEL, str(model_with_weights())), f"{page}, block {number}", "exec")
            exec(code, names)


@pytest.mark.parametrize("page", ["python-api.md", "evaluation.md"])
def test_every_public_name_on_the_page_exists(page: str) -> None:
    import nemorl

    for name in set(re.findall(r"\bnemorl\.([A-Za-z_]\w*)", (DOCS / page).read_text())):
        if name not in ("contracts", "plugins", "evaluation", "sources"):
            assert getattr(nemorl, name) is not None
