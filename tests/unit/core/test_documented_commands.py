"""Every command in the code blocks of the pages is one that its program accepts, with keys that configs have.

Those that need no more than this machine are run by ``tests/e2e/test_documented_commands_run.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documented_commands
import pytest
from documented_commands import (
    PROGRAMS,
    ROOT,
    Call,
    Documented,
    commands_of,
    documented,
    mentioned,
    understood,
    unknown,
)
from nemorl.base.text.mappings import read_source
from nemorl.config.load import load_config
from nemorl.errors import NemorlError

pytestmark = pytest.mark.slow

PAGES = list(dict.fromkeys(command.page for command in documented()))
CONFIG = {"algorithm": "grpo", "model": "org/model", "data": "arithmetic", "environment": "math"}
"""What a page's own config is taken for, where this is no file of the repository."""
AGENT = {**CONFIG, "environment": {"name": "agent", "command": ["python", "vote.py"], "reward": "vote.py:score"}}
CONFIGS = {"vote.yaml": AGENT, "run.yaml": {**CONFIG, "cluster": {"gpus_per_node": 8}}}
READERS = {"vote.py", "my_script.py", "gpu-check/check.py"}
"""What the reader has written, or unpacked."""
OF_PAGES = {"last"}
"""Commands of plugins that pages write."""
MODULES = {"venv", "sglang.launch_server", "pytest", "tinker_cookbook.recipes.math_rl.train"}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def problems_of(command: Documented) -> Iterator[str]:
    """Why a command cannot do what its page says."""
    if command.program == "nemorl" and not OF_PAGES.intersection(command.words[1:2]):
        try:
            yield from problems_of_config(understood(command.words[1:]))
        except Exception as error:
            yield f"{type(error).__name__}: {error}"
    elif command.program == "make":
        for word in command.words[1:]:
            name, is_set, _ = word.partition("=")
            known = rf"\$\({name}\)" if is_set else rf"^{name}:"
            if re.search(known, MAKEFILE, re.MULTILINE) is None:
                yield f"the Makefile has no {name}"
    elif command.program != "nemorl":
        yield from problems_of_program(command)


def problems_of_config(call: Call) -> Iterator[str]:
    """Overrides for which a config has no such key, or not with such a value."""
    changes = [*(call.given.get("overrides") or ()), *(call.given.get("changes") or ())]
    file = call.given.get("config")
    if file is not None and "=" in file.name:  # of `eval`, which needs no config
        file, changes = None, [str(file), *changes]
    changes = [change for change in changes if not change.startswith("suite.")]  # of a protocol, not of a config
    is_own = file is not None and (ROOT / file).is_file()
    data: dict[str, Any] = dict(read_source(ROOT / file) if is_own else CONFIGS.get(getattr(file, "name", ""), CONFIG))
    if any(change.startswith("launch.") for change in changes):
        data["launch"] = {"name": call.given.get("on") or "slurm"}
    try:
        load_config(data, changes, for_cluster=True)
    except NemorlError as error:
        yield str(error)


def is_readers(file: str) -> bool:
    """Whether this is a reader's own file, or below ``given``, where readers have what others publish."""
    return file in READERS or file.startswith("given/")


def problems_of_program(command: Documented) -> Iterator[str]:
    """Files and options that are not there, of ``python`` and ``pytest``."""
    words = [word.partition("::")[0] for word in command.words[1:]]
    files = [word for word in words if word.endswith(".py") or word.startswith("tests/")]
    if words[:1] == ["-m"] and words[1] not in MODULES:
        yield f"no known module {words[1]}"
    yield from (f"no file {file}" for file in files if not is_readers(file) and not (ROOT / file).exists())
    if not files and command.program != "pytest" and "-m" not in words:
        yield "no file is named"
    if not files or command.program == "pytest" or "-m" in words or not (ROOT / files[0]).is_file():
        return
    script = ROOT / files[0]
    text = "".join(path.read_text(encoding="utf-8") for path in (script, *script.parent.glob("_*.py")))
    options = [word for word in words if word.startswith("--")]
    given = [option for option in options if f'"{option}"' not in text]
    yield from (f"{files[0]} has no {option}" for option in given if f'"{option.replace("--no-", "--")}"' not in text)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_known_to_their_programs(page: str) -> None:
    own = [command for command in documented() if command.page == page]
    assert not [f"{command}: {problem}" for command in own for problem in problems_of(command)]


def test_commands_that_prose_names_exist_with_their_options() -> None:
    named = [one for page in documented_commands.pages() for one in mentioned(page)]
    assert len(named) > 240
    assert not [f"{one}: {word}" for one in named for word in unknown(one.words[1:]) if word not in OF_PAGES]
    assert unknown(["run", "list", "--jsn"]) == ["run", "--jsn"]


WRONG = """
```bash
nemorl train run.yaml policy.optimiser.lr=1   # no such key
nemorl plugins lst && FAST=1 nemorl view samples runs/a --wurst 3
node-1$ .venv/bin/nemorl train
make quickest | make test-fast
python benchmarks/view.py \\
  --jason a
python benchmarks/vue.py
nemorl runs list 'a
python benchmarks/view.py "b
```
```console
$ nemorl doctor --jsn
nemorl prints this
```
```python
nemorl = 1
```
"""


def test_each_mistake_is_found_at_its_line(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(WRONG)
    found = {(command.line, problem) for command in commands_of(page) for problem in problems_of(command)}
    assert sorted(line for line, _ in found) == [3, 4, 4, 5, 6, 7, 9, 10, 11, 14]
    assert (6, "the Makefile has no quickest") in found
    assert (7, "benchmarks/view.py has no --jason") in found


def test_many_pages_show_commands() -> None:
    programs = {command.program for command in documented()}
    assert programs == set(PROGRAMS)
    assert len([command for command in documented() if command.program == "nemorl"]) > 190
    assert documented_commands.pages()[0].name == "README.md"
