"""Damaged distributions: each metadata file spoiled in each way, all in one environment, which nemorl's index survives.

An interrupted pip, a full disk, a hard reset or a stranger's package can leave any of them. Every distribution here
offers one environment that works, as long as its files can be read. Other libraries that read metadata when they are
imported (pydantic does) may fail beside these files: the folder is on the path only while nemorl looks.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from installed_plugins import GOOD, write_distribution
from nemorl.base.packages.distributions import InstalledDistribution
from nemorl.base.packages.plugin_policy import PluginPolicy
from nemorl.plugins import Index, PluginEntry
from nemorl_insight.doctor.installed import Installed

TIMEOUT_S = 100
"""A command that reads a pipe or a device waits for ever."""


def put(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(content(path.read_bytes())))


def instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda path: void(path.unlink(), make(path))


def void(*_: object) -> None: ...


WAYS: dict[str, Callable[[Path], None]] = {
    "empty": put(lambda _: b""),
    "half": put(lambda old: old[: len(old) // 2]),
    "cut": put(lambda old: old[:-4]),
    "zeros": put(lambda old: bytes(len(old))),
    "bad-end": put(lambda old: old + b"\xff"),
    "bad-start": put(lambda old: b"\xff" + old),
    "utf16": put(lambda old: old.decode().encode("utf-16")),
    "bom": put(lambda old: b"\xef\xbb\xbf" + old),
    "noise": put(lambda old: random.Random(len(old)).randbytes(4096)),
    "brackets": put(lambda _: b"[" * 100_000),
    "no-equals": put(lambda old: old + b"\nneither name nor value\n"),
    "one-line": put(lambda old: old.replace(b"\n", b" ")),
    "long": put(lambda old: old + b"x" * 1_000_000),
    "commas": put(lambda old: b'a,b,c,d,e,f\n"' + old),
    "absent": lambda path: path.unlink(),
    "folder": instead(Path.mkdir),
    "pipe": instead(os.mkfifo),
    "loop": instead(lambda path: path.symlink_to(path)),
    "dangling": instead(lambda path: path.symlink_to("nowhere")),
    "endless": instead(lambda path: path.symlink_to("/dev/zero")),
    "forbidden": lambda path: path.chmod(0),
}
FILES = ("METADATA", "entry_points.txt", "RECORD", "top_level.txt", "direct_url.json", "WHEEL")
HEADERS = {
    "no-name": "Metadata-Version: 2.1\nVersion: 1.2\n",
    "no-version": "Metadata-Version: 2.1\nName: {name}\n",
    "odd-version": "Name: {name}\nVersion: one point two\n",
    "odd-requirement": "Name: {name}\nVersion: 1.2\nRequires-Dist: ?? nothing ??\nRequires-Dist: nemorl-core ?? 1\n",
    "odd-marker": 'Name: {name}\nVersion: 1.2\nRequires-Dist: nemorl-core; moon == "full"\n',
    "odd-comparison": 'Name: {name}\nVersion: 1.2\nRequires-Dist: nemorl-core; python_version ~= "x"\n',
    "colours": "Name: {name}\nVersion: \x1b[31m1.2\x1b[0m\nSummary: [bold]a[/] [/nothing]\n",
    "path": "Name: ../../{name}\nVersion: ../..\n",
}
REMAINS: dict[str, Callable[[Path], Any]] = {
    "acme_a_file-1.2.dist-info": lambda path: path.write_text("Name: acme-a-file\n"),
    "acme_a_pipe-1.2.dist-info": os.mkfifo,
    "acme_a_loop-1.2.dist-info": lambda path: path.symlink_to(path),
    "acme_a_zero-1.2.dist-info": lambda path: path.symlink_to("/dev/zero"),
    "acme_an_empty-1.2.dist-info": Path.mkdir,
    ".dist-info": Path.mkdir,
    "-.dist-info": Path.mkdir,
    ".egg-info": Path.mkdir,
    "acme_egg.egg-info": lambda path: path.write_bytes(b"Name: acme-egg\n\xff\xfe"),
    "acme_old_egg-1.2-py3.11.egg-info": Path.mkdir,
    "acme_pipe_egg.egg-info": os.mkfifo,
    os.fsdecode(b"acme_\xff-1.2.dist-info"): Path.mkdir,
    "acme_\nnewline-1.2.dist-info": Path.mkdir,
}
"""What lies beside the packages and is no folder of metadata, or an empty one."""
CASES = [f"acme-{file.lower().replace('.', '-').replace('_', '-')}-{way}" for file in FILES for way in WAYS]


def write_all(site: Path) -> None:
    """One distribution per file and way, named after both, and all kinds of remains."""
    for file in FILES:
        for way, spoil in WAYS.items():
            name = f"acme-{file.lower().replace('.', '-').replace('_', '-')}-{way}"
            spoil(complete(site, name) / file)
    for what, text in HEADERS.items():
        info = complete(site, f"acme-header-{what}")
        (info / "METADATA").write_text(text.format(name=f"acme-header-{what}"))
    for name, make in REMAINS.items():
        make(site / name)
    # Asked for by a plugin, so that `doctor` compares the versions of all.
    write_distribution(site, "acme-asks", {"asks": "acme_asks:Env"}, requires=tuple(f"{name}>=1" for name in CASES))


def complete(site: Path, name: str) -> Path:
    """A distribution with every file that pip writes."""
    module = name.replace("-", "_")
    write_distribution(site, name, {name: f"{module}:Env"}, requires=("nemorl-core>=0.1",))
    info = site / f"{module}-1.2.dist-info"
    (info / "RECORD").write_text(f"{module}.py,sha256=abc,{len(GOOD)}\n{info.name}/METADATA,,\n")
    (info / "top_level.txt").write_text(f"{module}\n")
    (info / "direct_url.json").write_text('{"url": "file:///nowhere", "dir_info": {"editable": true}}')
    (info / "WHEEL").write_text("Wheel-Version: 1.0\n")
    return info


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("damaged")
    write_all(folder)
    yield folder
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.is_file():
            path.chmod(0o600)


def entries(*path: str) -> list[PluginEntry]:
    """The index of an environment that has these folders, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*path, *sys.path])
        return list(Index.installed(PluginPolicy()).entries)


@pytest.fixture(scope="module")
def listed(site: Path) -> list[PluginEntry]:
    return entries(str(site))


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_plugin_works_or_says_what_is_wrong_with_it(listed: list[PluginEntry], name: str) -> None:
    ours = [entry for entry in listed if name in (entry.name, entry.distribution.replace("_", "-"))]
    usable = [entry for entry in ours if entry.status == "ok" and entry.name == name]
    said = [found for entry in ours for found in entry.diagnostics]
    silent = re.search("-(empty|absent|dangling)$", name)  # a distribution without a list offers nothing
    assert usable or said or (silent and "entry-points" in name), ours
    assert {found.code for found in said} <= {"NRL113"}
    assert all(found.fix for found in said)


@pytest.mark.parametrize(
    ("distribution", "said"),
    [
        ("acme-entry-points-txt-bad-start", "its entry_points.txt cannot be read (invalid start byte)"),
        ("acme-entry-points-txt-no-equals", "is no entry point: 'neither name nor value'"),
        ("acme-entry-points-txt-pipe", "its entry_points.txt is no file"),
        ("acme-entry-points-txt-endless", "its entry_points.txt is no file"),
        ("acme-entry-points-txt-loop", "its entry_points.txt cannot be read"),
        ("acme-metadata-utf16", "its METADATA cannot be read (invalid start byte)"),
        ("acme-metadata-pipe", "its METADATA is no file"),
        ("acme-metadata-absent", "its METADATA has no name"),
        ("acme-header-no-version", "its METADATA has no version"),
        ("acme-record-noise", "its RECORD cannot be read"),
        ("acme-top-level-txt-bad-end", "its top_level.txt cannot be read (invalid start byte)"),
        ("acme-a-file", "acme_a_file-1.2.dist-info is no folder"),
        ("acme-a-pipe", "acme_a_pipe-1.2.dist-info is no folder"),
        ("acme-a-loop", "cannot be read ([Errno 40] Too many levels of symbolic links"),
    ],
)
def test_the_damage_is_named(listed: list[PluginEntry], distribution: str, said: str) -> None:
    messages = [
        found.message
        for entry in listed
        if entry.distribution.replace("_", "-") == distribution
        for found in entry.diagnostics
    ]
    assert any(said in message for message in messages), messages


def test_sound_plugins_are_listed_as_without_the_damaged_ones(listed: list[PluginEntry]) -> None:
    assert [entry for entry in listed if not entry.distribution.startswith(("acme", "..", "unknown"))] == entries()


def test_a_damaged_record_stops_no_plugin(listed: list[PluginEntry]) -> None:
    states = {entry.name: entry.status for entry in listed if entry.kind == "environments"}
    assert {states[f"acme-record-{way}"] for way in WAYS} == {"ok"}


def test_all_that_can_be_read_is_installed_for_the_doctor(site: Path) -> None:
    found = Installed([str(site)])
    assert {f"acme-record-{way}" for way in WAYS} <= {package.key for package in found}
    assert all(list(package.points) is not None and package.requirements is not None for package in found)


def test_the_command_line_is_found_beside_damaged_distributions(site: Path, tmp_path: Path) -> None:
    look = f"import sys, nemorl_cli; sys.path.insert(0, {str(site)!r}); sys.argv[1:] = ['--version']; "
    done = subprocess.run(
        [sys.executable, "-c", look + "import runpy; runpy.run_module('nemorl', run_name='__main__')"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_library_that_reads_metadata_its_own_way_changes_nothing(site: Path, tmp_path: Path) -> None:
    """mlflow and others import ``importlib_metadata``, which takes over from the standard module."""
    assert find_spec("importlib_metadata"), "comes with mlflow-skinny, which the tests of loggers need"
    index = (
        "from nemorl.plugins import Index; print(*sorted(f'{e.id} {e.diagnostics}' for e in Index.installed().entries))"
    )
    alone, beside = (
        subprocess.run(
            [sys.executable, "-c", f"import sys, nemorl.plugins{more}; sys.path.insert(0, {str(site)!r}); {index}"],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True, cwd=tmp_path,
        ).stdout
        for more in ("", ", importlib_metadata")
    )  # fmt: skip
    assert "acme-record-noise:acme-record-noise" in alone
    assert beside == alone


@pytest.mark.slow
def test_many_entry_points_are_indexed_and_found(site: Path, tmp_path: Path) -> None:
    """Each against each would be 2.5 billion comparisons: minutes; this takes half a second."""
    many = tmp_path / "acme_many-1.2.dist-info"
    many.mkdir()
    (many / "METADATA").write_text("Name: acme-many\nVersion: 1.2\n")
    lines = (f"e{number} = acme_many:Env" for number in range(50_000))
    (many / "entry_points.txt").write_text("[nemorl.environments]\n" + "\n".join(lines))
    index = Index(list(InstalledDistribution(many).entry_points))  # no policy of this machine
    assert len(index.entries) == 50_000
    assert index.find("environments", "e49999").id == "acme-many:e49999"
