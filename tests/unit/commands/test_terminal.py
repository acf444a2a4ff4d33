"""Foreign text cannot act on the terminal, and everything that prints goes through the one place that sees to it."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from nemorl_cli.console import Console
from nemorl_cli.terminal import PlainConsole, called, plain, say, styled
from rich.table import Table

ROOT = Path(__file__).parents[3]
ATTACKS = {
    "clear the screen": ("\x1b[2J\x1b[Hgone", "\\x1b[2J\\x1b[Hgone"),
    "set the clipboard (OSC 52)": ("\x1b]52;c;ZWNobw==\x07", "\\x1b]52;c;ZWNobw==\\x07"),
    "a link (OSC 8)": ("\x1b]8;;http://evil\x1b\\ok", "\\x1b]8;;http://evil\\x1b\\ok"),
    "C1 controls": ("\x9b2J\x9d0;title\x9c", "\\x9b2J\\x9d0;title\\x9c"),
    "overwrite the line": ("error: bad\rok: fine", "error: bad\\x0dok: fine"),
    "backspaces": ("rm -rf /\x08\x08ls", "rm -rf /\\x08\\x08ls"),
    "right to left": ("report\u202egnp.exe", "report\\u202egnp.exe"),
    "isolates": ("a\u2066b\u2069", "a\\u2066b\\u2069"),
    "invisible": ("grpo\u200b", "grpo\\u200b"),
    "tags": ("a\U000e0041", "a\\U000e0041"),
    "half a pair": ("\ud800", "\\ud800"),
    "colours": ("\x1b[31mred\x1b[0m", "red"),
    "markup": ("[bold red]x[/] :warning: [link=http://evil]y[/link]", "[bold red]x[/] :warning: [link=http://evil]y[/link]"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), ATTACKS.values(), ids=ATTACKS)
def test_foreign_text_is_shown_and_does_nothing(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plain(text) == shown
    say(text)
    assert capsys.readouterr().out == shown + "\n"
    for printed in (text, styled(text, "bold"), table_of(text), table_of(styled(text))):
        file = io.StringIO()
        PlainConsole(file=file, width=200, force_terminal=False).print(printed)
        assert file.getvalue().strip() == shown
    file = io.StringIO()
    with Console(file=file, live=False) as console:
        console.start(text, None)
        console.message(text)
    assert file.getvalue().splitlines() == [shown, shown]


def table_of(cell: object) -> Table:
    table = Table.grid()
    table.add_row(cell)  # type: ignore[arg-type]
    return table


def test_ordinary_text_of_any_script_stays_as_it_is() -> None:
    text = "naïve Ω 漢字 ⚠️ 👩\u200d🔬 العربية עברית\ttab\nline"
    assert plain(text) == text
    assert plain("a\r\nb") == "a\nb"


def test_no_control_or_format_character_passes() -> None:
    harmless = {"\t", "\n", "\u200c", "\u200d"}  # joiners shape scripts and emoji
    for code in range(0x20000):
        character = chr(code)
        is_active = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        is_active |= unicodedata.bidirectional(character) in {
            "RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI",
        }  # fmt: skip
        if is_active and character not in harmless:
            assert character not in plain(f"a{character}b"), hex(code)


PRINTS = {"typer.echo", "typer.secho", "click.echo", "click.secho", "print", "rich.print", "sys.stdout.write"}
MAKES = {"rich.console.Console", "rich.text.Text"}
ALLOWED = {
    "toolkits/nemorl-cli/src/nemorl_cli/terminal.py": PRINTS | MAKES,
    "toolkits/nemorl-cli/src/nemorl_cli/answers.py": {"typer.echo"},  # JSON in ASCII
    "toolkits/nemorl-cli/src/nemorl_cli/console.py": MAKES,  # frames; what is foreign goes through `styled`
    "core/src/nemorl/base/audit/recording.py": {"print"},  # where there may be no terminal yet
    "toolkits/nemorl-trust/src/nemorl_trust/bytecode.py": {"print"},  # a program of its own, read by the kernel
    "toolkits/nemorl-rl/src/nemorl_rl/transports/broadcast.py": {"print"},  # into a worker's log
    "plugins/nemorl-tasks/src/nemorl_tasks/code/driver.py": {"print"},  # inside the sandbox
    "plugins/nemorl-ops/src/nemorl_ops/launch/node.py": {"print"},  # into a node's log
    "plugins/nemorl-ops/src/nemorl_ops/launch/detached.py": {"print"},  # a program of its own, read by the launcher
}


def sources() -> list[Path]:
    folders = [ROOT / "core/src", *ROOT.glob("nemorl-*/src"), *ROOT.glob("plugins/*/src")]
    found = [path for folder in folders for path in folder.rglob("*.py")]
    return [path for path in found if not {"testing", "packages", "inside"} & set(path.parts)]


def used_names(tree: ast.Module) -> set[str]:
    """Dotted names of what is called, with imports resolved."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {imported.get(name.partition(".")[0], name.partition(".")[0]) + name[len(name.partition(".")[0]) :]
            for name in called}  # fmt: skip


def test_everything_that_prints_goes_through_the_one_place() -> None:
    wrong = {}
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        direct = used_names(ast.parse(path.read_text(encoding="utf-8"))) & (PRINTS | MAKES) - ALLOWED.get(name, set())
        if direct:
            wrong[name] = direct
    assert not wrong


HOSTILE = "\x1b]0;owned\x07[bold]x[/]\u202e"


def test_no_command_lets_foreign_text_through(tmp_path: Path) -> None:
    """A plugin, a run and a config whose every text is hostile, as they are printed by the commands."""
    package = tmp_path / "site" / "evil-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: evil\nVersion: 1.0\nSummary: s{HOSTILE}\n")
    (package / "entry_points.txt").write_text(
        f"[nemorl.commands]\nevilcmd = evil:app\n[nemorl.environments]\nevil = evil{HOSTILE}:Config\n"
    )
    run = tmp_path / "runs" / f"r{HOSTILE}"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text('algorithm: grpo\nmodel: "m\\e]0;owned\\a\\u202e"\n')
    (run / "metrics.jsonl").write_text("")
    (config := tmp_path / "c.yaml").write_text(f'algorithm: grpo\n"k{HOSTILE.encode("unicode_escape").decode()}": 1\n')
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    commands = [
        ["--help"], ["plugins", "list"], ["plugins", "show", "evil"], ["plugins", "show", HOSTILE],
        ["runs", str(tmp_path / "runs")], ["config", "validate", str(config)], ["config", "show", HOSTILE],
        ["--debug", "train", str(config)],
    ]  # fmt: skip
    code = "import sys\nfrom nemorl_cli import main\n"
    code += "for arguments in eval(sys.argv[1]):\n    sys.argv[1:] = arguments\n"
    code += "    try: main()\n    except SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code, repr(commands)], capture_output=True, env=environment, timeout=120, check=False
    )
    printed = (done.stdout + done.stderr).decode()
    assert "\\x1b]0;owned\\x07[bold]x[/]\\u202e" in printed
    assert "\x1b]" not in printed
    assert "\u202e" not in printed
    assert "\x07" not in printed


@pytest.mark.parametrize(
    ("argument", "found_as", "name"),
    [
        (".venv/bin/nemorl", None, ".venv/bin/nemorl"),  # right after `make quickstart`
        (".venv/bin/nemorl", ".venv/bin", "nemorl"),
        (".venv/bin/nemorl", "elsewhere", ".venv/bin/nemorl"),  # another one would be found
        ("script.py", None, "nemorl"),
    ],
)
def test_a_command_is_called_as_a_shell_finds_it(
    argument: str, found_as: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (".venv/bin", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "nemorl").write_text("")
        (tmp_path / place / "nemorl").chmod(0o755)
    monkeypatch.setattr("sys.argv", [argument])
    monkeypatch.setenv("PATH", str(tmp_path / found_as) if found_as else "/nowhere")
    assert called() == name
