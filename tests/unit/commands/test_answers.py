"""Standard output of `--json` holds JSON and nothing else, whatever a plugin prints and however."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed_plugins import GOOD, Install
from nemorl.plugins import PluginEntry, registry
from nemorl_cli import main
from nemorl_cli.answers import echo_json, reserved_stdout

NOISE = """
import os, subprocess, sys
print("NOISE by print")
os.write(1, b"NOISE by number\\n")
sys.__stdout__.write("NOISE by the original\\n"); sys.__stdout__.flush()
subprocess.run(["echo", "NOISE by a program"])
"""


def nemorl(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "100"}
    command = [sys.executable, "-m", "nemorl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=site)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "plugins show gym --json",
        "plugins check gym --json",
        "config validate run.json --json",
        "config show run.json --json",
    ],
)
def test_what_a_plugin_prints_is_not_part_of_an_answer(install: Install, site: Path, arguments: str) -> None:
    install("acme-env", {"gym": "acme_env:Env"}, code=f"{NOISE}\n{_dedented()}")
    config = {"algorithm": "grpo", "model": "a/model", "data": "arithmetic", "environment": "gym"}
    (site / "run.json").write_text(json.dumps(config))
    done = nemorl(site, *arguments.split())
    json.loads(done.stdout)
    if "check" not in arguments:  # which looks at it in another process
        assert [line.split()[-1] for line in done.stderr.splitlines() if "NOISE" in line] == [
            "print",
            "number",
            "original",
            "program",
        ]
    without = nemorl(site, *arguments.removesuffix(" --json").split())
    assert without.returncode == done.returncode


def test_an_answer_goes_where_output_went_before(capfd: pytest.CaptureFixture[str]) -> None:
    with reserved_stdout():
        print("said meanwhile")
        echo_json({"a": 1})
    print("said after")
    out, err = capfd.readouterr()
    assert out == '{"a": 1}\nsaid after\n'
    assert "said meanwhile" in err


@pytest.mark.parametrize("entry", registry().index.of_kind("commands"), ids=lambda entry: str(entry.name))
@pytest.mark.slow
def test_commands_of_plugins_explain_themselves_like_all_others(
    entry: PluginEntry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = entry.name.split(".")
    shown = {}
    for option in ("--help", "-h"):
        monkeypatch.setattr(sys, "argv", ["nemorl", *words, option])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (None, 0)
        shown[option] = capfd.readouterr().out
    assert shown["-h"] == shown["--help"]
    assert shown["--help"].lstrip().startswith(f"Usage: nemorl {' '.join(words)} ")
    assert "─ Options ─" in shown["--help"]


def _dedented() -> str:
    from textwrap import dedent

    return dedent(GOOD)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"problems": 1}',
        "[" * 100_000,
        '{"problems": [{}], "notes": [], "passed": [], "skipped": {}}',
    ],
)
@pytest.mark.slow
def test_check_takes_no_answer_that_a_plugin_made_up(install: Install, site: Path, answer: str) -> None:
    # Its module runs in the process that answers, and knows where the answer goes.
    code = (
        f"import os, sys\nif 'smoke' in sys.argv[0]:\n    open(sys.argv[3], 'w').write({answer!r})\n    os._exit(0)\n"
    )
    install("acme-env", {"gym": "acme_env:Env"}, code=f"{code}\n{_dedented()}")
    done = nemorl(site, "plugins", "check", "gym", "--json")
    assert done.returncode == 1, done.stderr
    (result,) = json.loads(done.stdout)
    assert "without an answer" in result["problems"][0]["what"]
