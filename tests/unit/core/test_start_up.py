"""What may import what: DESIGN sections 2 and 8, checked on every source file and in fresh interpreters."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded_messages import Raises

ROOT = Path(__file__).parents[3]
CHECKOUT = [
    path for pattern in ("*", "toolkits/*", "plugins/*") for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
]
"""The packages of this checkout. A `.venv` beside them holds other projects."""
PACKAGES = {path.parent.name: source for path in CHECKOUT for source in (path.parent / "src").glob("nemorl*")}
PLUGINS = {path.name: path for path in PACKAGES.values() if path.name != "nemorl"}
TOOLKITS = {path.name for path in PACKAGES.values() if path.parents[2].name == "toolkits"}
KERNEL = ROOT / "core/src/nemorl"
SANDBOXED = ROOT / "plugins/nemorl-tasks/src/nemorl_tasks/code/inside"
COMPARES_BYTECODE = ROOT / "toolkits/nemorl-trust/src/nemorl_trust/bytecode.py"
"""A program of its own, which never runs what it loads."""
WRITES_HANDLES = ROOT / "plugins/nemorl-agents/src/nemorl_agents/servers/handles.py"
"""Pickles what engines on the same machine want so, and reads none."""
WRITES_BUFFERS = ROOT / "toolkits/nemorl-tensors/src/nemorl_tensors/travelling.py"
"""Says which memory a pickle of Ray's points to, and reads none."""
READS_AN_INDEX = ROOT / "plugins/nemorl-compat/src/nemorl_compat/dcp.py"
"""The index of checkpoints of PyTorch, by an unpickler that admits its classes alone."""
HEAVY = ("torch", "ray", "transformers", "vllm", "megatron", "datasets", "numpy", "pyarrow", "jinja2")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# In a fresh interpreter


@pytest.mark.parametrize(
    "statement",
    [
        "import nemorl",
        "from nemorl import GRPOConfig, SFTConfig",
        "from nemorl import Trainer, TrainResult, EarlyStopping, WandbCallback, train_dpo, train_grpo, train_sft",
        "from nemorl import get_training_backend, register_environment, register_generation_backend",
        "from nemorl_cli import main",
        "run('--help')",
        "run('--version')",
        "run('plugins', 'list')",
        "run('plugins', 'list', '--json')",
        "run('config', 'schema', 'grpo')",
    ],
)
def test_starting_up_imports_nothing_heavy(statement: str) -> None:
    without = (*HEAVY, "yaml", *(["pydantic"] if "--help" in statement or "main" in statement else []))
    code = f"""
import contextlib, io, sys
def run(*arguments):
    from nemorl_cli import main
    sys.argv = ["nemorl", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main()
    assert shown.getvalue().strip()
{statement}
print([name for name in {without!r} if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_validating_a_config_imports_no_torch(tmp_path: Path) -> None:
    config = {"algorithm": "grpo", "model": "some/model", "data": "arithmetic", "environment": "math"}
    code = f"""
import sys
from nemorl import load_config
load_config({config!r}, for_launch=True)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_listing_plugins_imports_none_of_them() -> None:
    code = """
import sys
from nemorl.plugins import registry
assert registry().index.entries
print(sorted({name.partition('.')[0] for name in sys.modules if name.startswith('nemorl_')}))
"""
    assert set(json.loads(python(code).replace("'", '"'))) <= TOOLKITS


def test_the_pytest_plugin_imports_nothing_heavy() -> None:
    # pytest loads it in everyone's test session, used or not.
    code = f"import sys, nemorl_testing.plugin; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert python(code).strip() == "[]"


def test_public_names_resolve() -> None:
    import nemorl

    for name in nemorl.__all__:
        assert getattr(nemorl, name) is not None
    assert set(nemorl.__all__) <= set(dir(nemorl))


def test_a_dataset_that_is_installed_needs_no_list_of_published_ones() -> None:
    config = {"algorithm": "grpo", "model": "org/model", "data": "arithmetic", "environment": "math"}
    load = f"from nemorl import load_config\nload_config({config})"
    code = f"import sys\n{load}\nprint('nemorl_tasks.datasets' in sys.modules)"
    assert python(code).split() == ["False"]


def test_names_of_installed_algorithms_resolve(raises: Raises) -> None:
    import nemorl
    import nemorl_grpo

    assert nemorl.GRPOConfig is nemorl_grpo.GRPOConfig
    assert nemorl.SFTTrainer.config_class is nemorl.SFTConfig
    with raises(AttributeError, "PPOTrainr"):
        _ = nemorl.PPOTrainr


# Import arrows


def files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def imports(path: Path, *, at_load: bool = False) -> Iterator[str]:
    """Modules that a file imports; ``at_load``: only those imported when the file itself is."""
    tree = ast.parse(path.read_text())

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield child.module or ""
            elif at_load and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            elif at_load and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for branch in child.orelse:
                    yield from walk(branch)
            else:
                yield from walk(child)

    return walk(tree)


def top(module: str) -> str:
    return module.partition(".")[0]


def test_every_package_of_the_repository_is_seen() -> None:
    declared = {path.parent.name for path in CHECKOUT if (path.parent / "src").is_dir()}
    assert declared == set(PACKAGES)
    assert {"nemorl_grpo", "nemorl_sft", "nemorl_dtensor", "nemorl_math_env", "nemorl_tasks"} <= set(PLUGINS)


LAYERS = ("nemorl", "nemorl_tensors", "nemorl_media", "nemorl_rl", "nemorl_trust", "nemorl_cli", "nemorl_testing")
"""The kernel and the toolkits; each may import those before it."""


@pytest.mark.parametrize("package", sorted(PLUGINS))
def test_imports_point_downwards(package: str) -> None:
    allowed = LAYERS[: LAYERS.index(package)] if package in LAYERS else LAYERS
    others = {*PLUGINS, "nemorl"} - {package, *allowed}
    for path in files(PLUGINS[package]):
        assert not others & set(map(top, imports(path))), f"{path} imports a package beside or above it"


SHARED_WHEELS = [
    path
    for name, path in sorted(PLUGINS.items())
    if path.parents[2].name == "plugins" and not (path / "config.py").exists() and any(path.glob("*/config.py"))
]
"""Distributions that hold several plugins, each in a folder; what folders share stands beside them."""


def test_there_are_shared_wheels() -> None:
    names = {path.name for path in SHARED_WHEELS}
    assert names >= {"nemorl_tasks", "nemorl_agents", "nemorl_insight", "nemorl_ops", "nemorl_preference"}


@pytest.mark.parametrize("package", SHARED_WHEELS, ids=lambda path: path.name)
def test_plugins_of_one_wheel_import_nothing_of_each_other(package: Path) -> None:
    # So that a wheel can be split again.
    rooms = {path.name for path in package.iterdir() if path.is_dir()}
    for room in rooms:
        others = tuple(f"{package.name}.{name}" for name in rooms - {room})
        for path in files(package / room):
            beside = {module for module in imports(path) if module.startswith(others)}
            assert not beside, f"{path} imports {beside}"


FOR_TYPES_ONLY = {"nemorl_rl", "nemorl_tensors"}


def test_the_kernel_imports_no_toolkit_and_no_plugin() -> None:
    others = set(PLUGINS)
    for path in files(KERNEL):
        found = others & set(map(top, imports(path)))
        assert found <= FOR_TYPES_ONLY, f"{path} imports {found}"
        assert not others & set(map(top, imports(path, at_load=True))), f"{path} imports tensors at load"


RAY_MODULES = tuple(f"ray_{name}.py" for name in ("answers", "cluster", "drain", "launcher", "pulses", "workers"))


def test_torch_and_ray_are_not_loaded_with_the_kernel() -> None:
    for path in files(KERNEL):
        loaded = set(imports(path, at_load=True))
        # What is made of Ray imports it; whoever wants Ray imports such a module when it does.
        heavy = set(HEAVY) - ({"ray"} if path.name in RAY_MODULES else set())
        assert not heavy & set(map(top, loaded)), f"{path} imports something heavy at load"
        ours = {f"nemorl.resources.{Path(name).stem}" for name in RAY_MODULES}
        assert path.name in RAY_MODULES or not ours & loaded, f"{path} loads Ray at load"


@pytest.mark.parametrize("package", PLUGINS)
def test_a_plugins_config_module_imports_nothing_heavy(package: str) -> None:
    for name in ("__init__.py", "config.py"):
        path = PLUGINS[package] / name
        if path.is_file():
            assert not set(HEAVY) & set(map(top, imports(path, at_load=True))), f"{path} imports something heavy"


def test_no_code_that_runs_uses_pickle_or_eval() -> None:
    for package in PACKAGES.values():
        for path in files(package):
            if package.name == "nemorl_testing":
                continue  # checks that configs can be pickled
            loaders = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} & set(map(top, imports(path)))
            known = (COMPARES_BYTECODE, READS_AN_INDEX, WRITES_HANDLES, WRITES_BUFFERS)
            assert not loaders or path in known, f"{path} imports {loaders}"
            if path in (WRITES_HANDLES, WRITES_BUFFERS):
                used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
                assert not used & {"load", "loads", "Unpickler"}, f"{path} reads pickles"
            calls = {
                node.func.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            if path.parent == SANDBOXED:
                continue  # runs programs, and the tests of rows, in a sandbox: that is what it is for
            assert not calls & {"eval", "exec"}, f"{path} calls eval or exec"


# Packaging


def projects() -> dict[str, dict[str, object]]:
    found = {}
    for path in [
        ROOT / "pyproject.toml",
        *sorted(ROOT.glob("*/pyproject.toml")),
        *sorted(ROOT.glob("toolkits/*/pyproject.toml")),
        *sorted(ROOT.glob("plugins/*/pyproject.toml")),
    ]:
        project = tomllib.loads(path.read_text())["project"]
        found[project["name"]] = project
    return found


def test_all_packages_have_the_version_of_the_kernel() -> None:
    from nemorl import __version__

    assert {name: project["version"] for name, project in projects().items()} == dict.fromkeys(projects(), __version__)


def test_packages_ask_for_this_minor_version_of_each_other() -> None:
    from nemorl import __version__

    major, minor, _ = __version__.split(".")
    wanted = f">={__version__},<{major}.{int(minor) + 1}"
    for name, project in projects().items():
        for requirement in project.get("dependencies", []):  # type: ignore[attr-defined]
            match = re.fullmatch(r"(nemorl[\w-]*)(\[[\w,]+\])?(.*)", requirement)
            if match:
                assert match[3] == wanted, f"{name} requires {requirement}"
                assert match[1] in projects(), f"{name} requires {match[1]}, which is not in this repository"


def test_every_plugin_requires_the_kernel_and_the_metapackage_every_standard_plugin() -> None:
    found = projects()
    for name, project in found.items():
        needs = {re.split(r"[\[>=<; ]", requirement)[0] for requirement in project.get("dependencies", [])}  # type: ignore[attr-defined]
        if name not in ("nemorl-core", "nemorl"):
            assert "nemorl-core" in needs, name
    meta = " ".join(found["nemorl"]["dependencies"])  # type: ignore[arg-type]
    for name in ("nemorl-core", "nemorl-dtensor", "nemorl-math-env", "nemorl-grpo", "nemorl-sft", "nemorl-tasks"):
        assert name in meta


def test_the_kernel_requires_no_torch_and_nothing_of_ours() -> None:
    needs = projects()["nemorl-core"]["dependencies"]
    assert not [name for name in needs if name.startswith(("torch", "nemorl"))]  # type: ignore[attr-defined]


MOST_DISTRIBUTIONS = 22


def test_a_distribution_has_a_dependency_an_owner_or_a_cadence_of_its_own() -> None:
    assert len(projects()) <= MOST_DISTRIBUTIONS


@pytest.mark.parametrize("package", sorted(PLUGINS))
def test_a_package_requires_what_it_imports_of_ours(package: str) -> None:
    name = package.replace("_", "-")
    required = {re.split(r"[\[>=<; ]", line)[0] for line in projects()[name]["dependencies"]}  # type: ignore[attr-defined]
    written_out = PLUGINS[package] / "packages"  # what `plugins new` writes: packages in their own right
    used = {
        top(module) for path in files(PLUGINS[package]) if written_out not in path.parents for module in imports(path)
    }
    ours = {"nemorl-core" if name == "nemorl" else name.replace("_", "-") for name in used & {"nemorl", *PLUGINS}}
    assert ours - {name} <= required


def test_whoever_asks_for_a_part_of_an_extra_is_told_which() -> None:
    from nemorl.base.packages.standard_plugins import EXTRAS, STANDARD_PLUGINS
    from nemorl.plugins import Index

    extras = projects()["nemorl"]["optional-dependencies"]
    assert all(any(line.startswith(name) for line in extras[extra]) for name, extra in EXTRAS.items())  # type: ignore[index]
    found = {f"{entry.kind}:{entry.name}": entry.distribution for entry in Index.installed().entries}
    asked_for = {key: name for key, name in found.items() if not key.startswith(("templates:", "report_sections:"))}
    left_out = {key: name for key, name in asked_for.items() if name in EXTRAS}
    assert left_out == {key: STANDARD_PLUGINS.get(key) for key in left_out}


def test_every_package_is_typed_and_described() -> None:
    for folder, package in PACKAGES.items():
        assert (package / "py.typed").is_file(), f"{folder} has no py.typed"
        assert (package.parents[1] / "README.md").is_file(), f"{folder} has no README.md"
    assert all(project.get("description") for project in projects().values())


def test_every_wheel_brings_the_licence_and_says_for_which_pythons() -> None:
    licence = (ROOT / "LICENSE").read_text()
    for folder in (ROOT, *(package.parents[1] for package in PACKAGES.values())):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["license-files"] == ["LICENSE"], folder
        assert (folder / "LICENSE").read_text() == licence, folder
        assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= {*project["classifiers"]}


def test_entry_points_name_classes_and_files_that_exist() -> None:
    for package in PACKAGES.values():
        groups = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["project"].get("entry-points", {})
        for group, entries in groups.items():
            for value in entries.values():
                module, _, name = value.partition(":")
                if group == "nemorl.templates":
                    assert (package.parent / module.replace(".", "/") / name).is_file(), f"{group}: {value}"
                    continue
                source = package.parent / f"{module.replace('.', '/')}.py"
                assert source.is_file() or (source.with_suffix("") / "__init__.py").is_file(), f"{group}: {value}"


def test_the_command_answers_as_json() -> None:
    code = """
import contextlib, sys
from nemorl_cli import main
sys.argv = ["nemorl", "doctor", "--json"]
with contextlib.suppress(SystemExit):  # 1 where this machine has a problem
    main()
"""
    facts = json.loads(python(code))
    assert facts["plugins"]
    assert facts["broken_plugins"] == []
