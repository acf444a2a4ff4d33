"""What `--locked` sees: all files that a distribution's code can come from, and compiled files that are not its own."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from installed_plugins import GOOD, write_distribution
from nemorl.base.packages.distributions import InstalledDistribution
from nemorl.config.load import load_config
from nemorl.errors import UsageError
from nemorl.plugins import Index, Registry
from nemorl_testing.plugin import use_registry
from nemorl_trust.lock import locked_plugins, refuse_other_plugins, write_lock
from nemorl_trust.lock_files import files_of, foreign_bytecode, hash_of
from recorded_messages import Raises

INFO = "acme_env-1.2.dist-info"
PLANTED = "raise SystemExit('PLANTED')"


def installed(site: Path) -> Path:
    """A distribution of a module, two packages (one a namespace), a data file and a script, as pip writes it."""
    write_distribution(site, "acme-env", {"gym": "acme_env:Env"})
    texts = {
        "acme_env.py": (site / "acme_env.py").read_text(),
        "acme_second/__init__.py": "x = 1\n",
        "acme_second/deep/other.py": "y = 2\n",
        "acme_second/rules.yaml": "a: 1\n",
        "acme_space/part/__init__.py": "z = 3\n",
        "../bin/acme-tool": "#!/this/machine/bin/python\nimport acme_env\n",
        "../share/acme/table.txt": "1 2\n",
        "acme.pth": "/this/machine/src\n",
    }
    for name, text in texts.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    own = [f"{INFO}/{name}" for name in ("METADATA", "entry_points.txt", "INSTALLER", "direct_url.json", "RECORD")]
    (site / INFO / "INSTALLER").write_text("pip\n")
    (site / INFO / "direct_url.json").write_text("{}")
    (site / INFO / "RECORD").write_text("".join(f"{name},,\n" for name in (*texts, "__pycache__/acme_env.pyc", *own)))
    return site


def editable(site: Path) -> Path:
    """The same as an editable install: the metadata here, the code in a project's folder."""
    source = site.parent / "project" / "src"
    source.mkdir(parents=True)
    installed(site)
    for name in ("acme_env.py", "acme_second", "acme_space"):
        shutil.move(site / name, source / name)
    (site / "acme.pth").write_text(f"{source}\n")
    kept = ("acme.pth", f"{INFO}/METADATA", f"{INFO}/entry_points.txt", f"{INFO}/RECORD")
    (site / INFO / "RECORD").write_text("".join(f"{name},,\n" for name in kept))
    return source


def files(site: Path) -> dict[str, Path]:
    importlib.invalidate_caches()
    return files_of(Index(list(InstalledDistribution(site / INFO).entry_points)).entries)


def hashed(site: Path) -> str:
    return hash_of(files(site))


def foreign(site: Path) -> list[str]:
    return [path.name for path in foreign_bytecode(files(site), InstalledDistribution(site / INFO))]


def rewrite(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def plant_folder(path: Path) -> None:
    path.mkdir()
    (path / "__init__.py").write_text(PLANTED)


def link_to_elsewhere(path: Path) -> None:
    path.symlink_to(next(found for folder in path.parents if (found := folder / "elsewhere").is_dir()))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "its module": ("acme_env.py", rewrite(GOOD + "# edited")),
    "a second package": ("acme_second/__init__.py", rewrite("x = 2\n")),
    "deep in it": ("acme_second/deep/other.py", rewrite("y = 3\n")),
    "its data": ("acme_second/rules.yaml", rewrite("a: 2\n")),
    "a namespace package": ("acme_space/part/__init__.py", rewrite("z = 4\n")),
    "a file that is gone": ("acme_second/deep/other.py", Path.unlink),
    "a new module": ("acme_second/new.py", rewrite(PLANTED)),
    "a new file of data": ("acme_space/part/new.json", rewrite("{}")),
    "a module without source": ("acme_second/hidden.pyc", rewrite("compiled")),
    "a package before the module": ("acme_env", plant_folder),
    "a package before a submodule": ("acme_second/deep/other", plant_folder),
    "an extension before the module": ("acme_env.abi3.so", rewrite("ELF")),
    "a link to code elsewhere": ("acme_second/linked", link_to_elsewhere),
}
RECORDED_CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "its metadata": (f"{INFO}/METADATA", rewrite("Name: acme-env\nVersion: 1.2\nRequires-Dist: evil\n")),
    "its entry points": (f"{INFO}/entry_points.txt", rewrite("[nemorl.environments]\ngym = acme_env:Other\n")),
    "a line that runs at start": ("acme.pth", rewrite("import acme_second\n")),
    "its script": ("../bin/acme-tool", rewrite("#!/this/machine/bin/python\nimport acme_second\n")),
    "data elsewhere": ("../share/acme/table.txt", rewrite("1 3\n")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", [installed, editable])
def test_every_change_of_code_or_data_is_seen(
    site: Path, tmp_path: Path, how: Callable[[Path], Path], change: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "code.py").write_text("print('elsewhere')")
    folder = how(site)
    if how is editable:
        sys.path.insert(0, str(folder))  # what the .pth file does when Python starts
    try:
        before = hashed(site)
        assert hashed(site) == before
        name, make = CHANGES[change]
        make(folder / name)
        assert hashed(site) != before
    finally:
        if how is editable:
            sys.path.remove(str(folder))


@pytest.mark.parametrize("change", RECORDED_CHANGES)
def test_every_change_of_what_pip_recorded_is_seen(site: Path, change: str) -> None:
    before = hashed(installed(site))
    name, make = RECORDED_CHANGES[change]
    make(site / name)
    assert hashed(site) != before


def test_what_differs_between_machines_is_not_a_change(site: Path) -> None:
    before = hashed(installed(site))
    (site / INFO / "INSTALLER").write_text("uv\n")
    (site / INFO / "direct_url.json").write_text('{"url": "file:///elsewhere"}')
    (site / "acme.pth").write_text("/another/machine/src\n")
    (site / "../bin/acme-tool").write_text("#!/another/machine/bin/python\nimport acme_env\n")
    py_compile.compile(str(site / "acme_env.py"))
    py_compile.compile(str(site / "acme_second/__init__.py"))
    write_distribution(site, "acme-neighbour", {"other": "acme_neighbour:Env"})
    (site / "acme_space/neighbour").mkdir()  # another distribution's part of a namespace
    (site / "acme_space/neighbour/__init__.py").touch()
    assert hashed(site) == before


def test_two_copies_of_a_release_have_one_hash(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = hashed(installed(site))
    shutil.copytree(site, tmp_path / "copy" / "site")
    for folder in ("bin", "share"):
        shutil.copytree(tmp_path / folder, tmp_path / "copy" / folder)
    monkeypatch.syspath_prepend(str(tmp_path / "copy" / "site"))
    assert hashed(tmp_path / "copy" / "site") == here


def test_a_module_that_was_loaded_from_elsewhere_counts(site: Path, tmp_path: Path) -> None:
    before = hashed(installed(site))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "grown.py").write_text("w = 1\n")
    package = importlib.import_module("acme_second")
    assert hashed(site) == before
    package.__path__.append(str(tmp_path / "elsewhere"))
    importlib.import_module("acme_second.grown")
    first = hashed(site)
    assert first != before
    (tmp_path / "elsewhere" / "grown.py").write_text("w = 2\n")
    assert hashed(site) != first


def plant(source: Path, mode: PycInvalidationMode, code: str = PLANTED) -> Path:
    """Compiled code in the place of a source's own, with a head that Python takes for that source's."""
    real, status = source.read_bytes(), source.stat()
    source.write_text(code)
    compiled = Path(py_compile.compile(str(source), invalidation_mode=mode, doraise=True) or "")
    source.write_bytes(real)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    honest = Path(py_compile.compile(str(source), str(source.with_suffix(".tmp")), invalidation_mode=mode) or "")
    head = honest.read_bytes()[:16]
    honest.unlink()
    compiled.write_bytes(head + compiled.read_bytes()[16:])
    return compiled


MODES = list(PycInvalidationMode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_planted_bytecode_runs_in_python_and_is_named_here(site: Path, mode: PycInvalidationMode) -> None:
    source = installed(site) / "acme_second/deep/other.py"
    before = hashed(site)
    plant(source, mode)
    ran = subprocess.run(
        [sys.executable, "-c", "import acme_second.deep.other"],
        env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "PLANTED" in ran.stderr  # Python believes the head
    assert foreign(site) == [Path(cache_from_source(source)).name]
    assert hashed(site) == before  # caches come and go


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_bytecode_of_the_source_itself_is_fine(site: Path, mode: PycInvalidationMode) -> None:
    for source in (installed(site) / "acme_second").rglob("*.py"):
        py_compile.compile(str(source), invalidation_mode=mode)
    assert foreign(site) == []


def test_bytecode_that_python_passes_by_is_fine_and_what_it_never_checks_is_not(site: Path) -> None:
    source = installed(site) / "acme_second/__init__.py"
    for mode, found in (
        (PycInvalidationMode.TIMESTAMP, []),
        (PycInvalidationMode.CHECKED_HASH, []),
        (PycInvalidationMode.UNCHECKED_HASH, [Path(cache_from_source(source)).name]),
    ):
        py_compile.compile(str(source), invalidation_mode=mode)
        source.write_text(f"edited = '{mode}'\n")
        assert foreign(site) == found, mode


@pytest.mark.parametrize("content", [b"", b"short", importlib.util.MAGIC_NUMBER + b"\1" + bytes(11) + b"no code"])
def test_a_compiled_file_that_is_damaged_is_foreign_or_passed_by(site: Path, content: bytes) -> None:
    source = installed(site) / "acme_second/__init__.py"
    compiled = Path(cache_from_source(source))
    compiled.parent.mkdir()
    compiled.write_bytes(content)
    assert foreign(site) == ([compiled.name] if content[:4] == importlib.util.MAGIC_NUMBER else [])


def test_bytecode_on_which_python_crashes_is_foreign_and_harms_nobody(site: Path) -> None:
    source = installed(site) / "acme_second/deep/other.py"
    compiled = plant(source, PycInvalidationMode.UNCHECKED_HASH)
    compiled.write_bytes(compiled.read_bytes()[:16] + b")\xff" * 40_000)  # tuples in tuples
    assert foreign(site) == [compiled.name]


def test_a_module_without_source_is_foreign_unless_pip_installed_it(site: Path) -> None:
    hidden = installed(site) / "acme_second/hidden.pyc"
    hidden.write_bytes(b"compiled")
    assert foreign(site) == ["hidden.pyc"]
    with (site / INFO / "RECORD").open("a") as record:
        record.write("acme_second/hidden.pyc,,\n")
    assert foreign(site) == []


@pytest.mark.slow
def test_a_locked_run_refuses_all_of_it(site: Path, tmp_path: Path, tiny_model: Path, raises: Raises) -> None:
    installed(site)
    data = {"algorithm": "grpo", "model": str(tiny_model), "data": "arithmetic", "policy": {"init": "random"}}
    with use_registry(Registry(Index.installed())):
        config = load_config({**data, "environment": "gym"})
        write_lock(tmp_path, locked_plugins(config))
        record = tmp_path / "plugins.lock.json"
        refuse_other_plugins(config, record)
        plant(site / "acme_second/__init__.py", PycInvalidationMode.UNCHECKED_HASH)
        with raises(UsageError, "acme-env", "acme_second/__pycache__"):
            refuse_other_plugins(config, record)
        shutil.rmtree(site / "acme_second/__pycache__")
        (site / "acme_second/deep/other.py").write_text("y = 3\n")
        with raises(UsageError, "acme-env", "1.2"):
            refuse_other_plugins(config, record)
    assert json.loads(record.read_text())["plugins"]


def test_pipes_loops_and_damage_end_no_run(site: Path) -> None:
    installed(site)
    os.mkfifo(site / "acme_second/pipe.py")
    (site / "acme_second/around").symlink_to(site / "acme_second")
    (site / "acme_second/nowhere.py").symlink_to("nothing")
    (site / "acme_second/broken.py").write_text("class (")
    with (site / INFO / "RECORD").open("ab") as record:
        record.write(b"/dev/zero,,\n\xff\xfe,a,b,c,d\n../../../../../../etc,,\n")
    assert len(hashed(site)) == 64
    assert foreign(site) == []
