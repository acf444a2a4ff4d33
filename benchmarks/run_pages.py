"""Runs again what the pages of docs/results say was run, and keeps what came of it.

    python benchmarks/run_pages.py --list               # every page and its commands
    python benchmarks/run_pages.py losses view          # those of two pages
    python benchmarks/run_pages.py                      # all of them: a day on two cores

A page's commands are the lines of its code blocks that begin with ``python``, ``pytest``, ``nemorl`` or ``make``, and
inline code that names a benchmark or a test. They run in ``.benchmarks/PAGE``, one after the other; what they print
stays there, to be read beside the page; when, where and for how long each ran goes to ``docs/results/reruns.json``, and
from there into the table of docs/results/index.md. A command that has run at this commit is not run again unless told
``--fresh``, so a run that was stopped goes on where it was. Models that a page prepares lie in ``models``, and what
others wrote (NeMo RL's configs, a cookbook) in ``given``, as the page says; a command that needs what is not there is
left, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
RERUNS = RESULTS / "reruns.json"
OUTPUTS = ROOT / ".benchmarks"
_START = r"(?:[A-Z_]+=\S+ )*(?:python|pytest|nemorl|make) "
_BLOCK = re.compile(r"^( *)```\w*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:python benchmarks/|pytest )[^`]*)`")
_BROUGHT = re.compile(r"\b(?:models|given)/[\w.-]+")
"""What the reader brings, or a command before."""
LINKED = ("benchmarks", "docs", "examples", "tests", "pyproject.toml")
"""Of the repository, in the folder in which commands run."""
BROUGHT = ("models", "given")
"""Linked there, too; no part of the repository."""


@dataclass(frozen=True)
class Command:
    """One line of a page."""

    page: str
    number: int
    """From 1."""
    line: str
    remark: str = ""
    """The comment behind it: how long it takes, say."""

    @property
    def key(self) -> str:
        return f"{self.page}: {self.line}"

    @property
    def asks(self) -> str:
        """What it asks for that this program cannot give it; empty where it can be run as it is."""
        if "gpu/" in self.line:
            return "a GPU"
        if " make " in f" {self.line}":
            return "a clone of its own"
        return next(iter(_BROUGHT.findall(self.line)), "")

    @property
    def lacks(self) -> str:
        """The part of it that is not there now."""
        brought = _BROUGHT.findall(self.line)
        return next((path for path in brought if not (ROOT / path).exists()), "") if brought else self.asks


def commands(page: Path) -> list[Command]:
    """A page's, in their order, each once."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for _, block in _BLOCK.findall(text)]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[4:] for line in text.splitlines() if line.startswith("    ")]
    lines += [" ".join(line.split()) for line in _INLINE.findall(_BLOCK.sub("", text))]
    found: dict[str, str] = {}
    for line in lines:
        if re.match(_START, line):
            plain, _, remark = re.sub(r"\s+#\s*", "#", line).partition("#")
            found.setdefault(" ".join(plain.split()), remark)
    return [Command(page.stem, number, line, remark) for number, (line, remark) in enumerate(found.items(), 1)]


def pages() -> list[Path]:
    """All of them."""
    return [page for page in sorted(RESULTS.glob("*.md")) if page.stem != "index"]


def run(command: Command, limit_s: float) -> dict[str, Any]:
    """Run it here, with what it prints in a file."""
    words = shlex.split(command.line)
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    words[0] = str(Path(sys.executable).with_name(words[0]))
    folder = OUTPUTS / command.page
    folder.mkdir(parents=True, exist_ok=True)
    for name in BROUGHT:
        (ROOT / name).mkdir(exist_ok=True)
    for name in LINKED + BROUGHT:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(ROOT / name)
    started_s = time.monotonic()
    with (folder / f"{command.number}.txt").open("w") as output:
        output.write(f"$ {command.line}\n")
        output.flush()
        # A session of its own: what it started ends with it.
        with subprocess.Popen(
            words,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(limit_s)
                result = "ok" if code == 0 else f"exit {code}"
            except subprocess.TimeoutExpired:
                result = "late"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return {
        "result": result,
        "seconds": round(time.monotonic() - started_s),
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "commit": _commit(),
    }


def table(found: dict[str, Any]) -> str:
    """The page that lists all of them."""
    own = {page: commands(page) for page in pages()}
    every = [command for listed in own.values() for command in listed]
    again = [found[command.key] for command in every if command.key in found]
    failed = [entry for entry in again if entry["result"] != "ok"]
    needing = [command for command in every if command.key not in found and command.asks]
    lines = [
        "# What was measured",
        "",
        "Each page names its machine, its date and its peer, and has the commands that gave its figures. "
        "`make benchmarks` runs",
        "them again (`make benchmarks PAGES='losses view'` some of them), and this table says when that was last done.",
        "",
        f"**Of {len(every)} commands of {len(own)} pages {len(again)} were run again"
        + (f" ({_when(again)})" if again else "")
        + f"; {len(failed)} of these did not end well.**",
        f"Of the {len(every) - len(again)} others {len(needing)} need a GPU, a clone or what others wrote. Load is",
        "that of the machine when a command ended: above its cores seconds say little, and pages keep quieter figures.",
        "What a page says of a test is held by `make test`. The README's figures are those of "
        "[a model that sees](quickstart-vision.md)",
        "and [a GPU](gpu.md).",
        "",
        "| page | run again | when | left: which of its commands, and why |",
        "|---|---|---|---|",
    ]
    for page, listed in own.items():
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        entries = [found[command.key] for command in listed if command.key in found]
        left = [(command, _reason(command, found)) for command in listed if not _done(command, found)]
        said = [f"{command.number} ({reason})" for command, reason in left if reason]
        said += [f"{len(left) - len(said)} of them not yet"] if len(left) > len(said) else []
        when = _when(entries) if entries else ""
        lines.append(f"| [{title}]({page.name}) | {len(entries)} of {len(listed)} | {when} | {'; '.join(said)} |")
    return "\n".join(lines) + "\n"


def _when(entries: list[dict[str, Any]]) -> str:
    """When these ran, at what load, and for how long together."""
    dates = sorted({entry["date"] for entry in entries})
    loads = sorted(entry["load"] for entry in entries)
    minutes = sum(entry["seconds"] for entry in entries) / 60
    return (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, "
        f"load {' to '.join(str(load) for load in dict.fromkeys((loads[0], loads[-1])))}, {minutes:.1f} minutes"
    )


def _done(command: Command, found: dict[str, Any]) -> bool:
    return found.get(command.key, {}).get("result") == "ok"


def _reason(command: Command, found: dict[str, Any]) -> str:
    """Why a command has not been run again, or not to a good end."""
    needs = f"needs {command.asks}" if command.asks else ""
    return found.get(command.key, {}).get("result") or needs or command.remark


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="names of pages, without .md; all if none is given")
    parser.add_argument("--list", action="store_true", help="show the commands and run none")
    parser.add_argument("--fresh", action="store_true", help="run what has run at this commit, too")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each command")
    options = parser.parse_args()
    unknown = sorted(set(options.pages) - {page.stem for page in pages()})
    if unknown:
        parser.error(f"docs/results has no page {unknown[0]!r}; it has {', '.join(page.stem for page in pages())}")
    chosen = [c for page in pages() if not options.pages or page.stem in options.pages for c in commands(page)]
    found: dict[str, Any] = json.loads(RERUNS.read_text()) if RERUNS.is_file() else {}
    current, failed = _commit(), 0
    for number, command in enumerate(chosen, 1):
        head = f"[{number}/{len(chosen)}] {command.key}"
        done = found.get(command.key, {})
        if options.list or command.lacks:
            print(head + (f"  (not run: needs {command.lacks})" if command.lacks else ""), flush=True)
        elif done.get("commit") == current and done["result"] == "ok" and not options.fresh:
            print(f"{head}  (has run at this commit)", flush=True)
        else:
            print(head, flush=True)
            found[command.key] = run(command, options.minutes * 60)
            failed += found[command.key]["result"] != "ok"
            print(f"    {found[command.key]['result']} after {found[command.key]['seconds']} s", flush=True)
            RERUNS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if not options.list:
        (RESULTS / "index.md").write_text(table(found), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
