"""Every Python block of the five documents runs: as it is written, and under the names that the warnings advise.

How each is run is said in ``spec_world``; the copies of the documents are beside this file.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import spec_world as world
from forked_workers import begun_by
from nemorl.plugins import Index, Registry
from nemorl_testing.plugin import use_registry
from spec_blocks import BLOCKS, FOLDER, OWN_PACKAGE, under_new_names

DOCUMENTS = {
    "api-documentation.md": (5, "0dead2eccc4e50402b43479071096a73284b66cd8169eef5d096fa5b4f803f8f"),
    "architecture-guide.md": (20, "52eee3a0ce96e3a513ad4a0a88f2affac61e2e99840a39fc50ae75fade311b48"),
    "architecture-overview.md": (0, "eab2aae084d213e7db8b763e0427e143156ac4679c32c381ae4ddd28a0faf8af"),
    "component-diagram.md": (0, "2d90eb1f9c72d349611e1d3ed05eea002d75bfdeff9536f24f35fa80396f56ca"),
    "prd-refactoring.md": (9, "2ea6d2c34526b3966be924f06e385a973ef363378b84f32dfcdd411f0f6c7bf2"),
}
"""Blocks and SHA-256 of the documents as they were given."""


def runs(*, is_new: bool) -> list[Any]:
    """The blocks that run under these names, each with its marks.

    Under the new ones what trains is left to ``make test-full``: its old names lead to the same code, and that each has
    its new one is seen in less.
    """
    found = []
    for name, use in world.USES.items():
        if not use.not_run and not (is_new and use.not_new):
            is_slow = use.trains or use.ray
            marks = (
                [pytest.mark.slow] * is_slow + [pytest.mark.ray] * use.ray + [pytest.mark.full] * (is_slow and is_new)
            )
            found.append(pytest.param(name, id=name, marks=marks))
    return found


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("spec")
    return world.replaced(world.write_terse_model(folder / "model"), world.write_rows(folder / "rows.jsonl"))


@pytest.fixture(scope="module")
def two_nodes(python_of_workers: Path) -> Iterator[None]:
    """Two nodes of one machine with as many places as the documents ask for, however many cores there are."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with begun_by(python_of_workers):
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 9})
            cluster.add_node(num_cpus=9)
            cluster.wait_for_nodes()
        ray.init(cluster.address, namespace="nemorl", log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def run(
    texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Executes a block in a folder of its own; what it registers ends with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def provide(module: str, **names: Any) -> None:
        """A package that the reader has written."""
        made = ModuleType(module)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, module, made)

    def execute(name: str, *, is_new: bool) -> None:
        use = world.USES[name]
        if use.ray:
            request.getfixturevalue("two_nodes")
        source = use.source(BLOCKS[name], BLOCKS, is_new=is_new)
        for old, new in texts.items():
            source = source.replace(old, new)
        source = under_new_names(source) if is_new else source
        given = {name: getattr(world, name) for name in ("ROWS", "my_dataset", "provide_megatron", "rewards_of")}
        given |= {"__name__": "spec_block", "MODEL": texts["llama2-7b"], "provide": provide}
        exec(compile(source, name, "exec", dont_inherit=True), given)

    with use_registry(Registry(Index.installed())), warnings.catch_warnings():
        yield execute


@pytest.mark.parametrize("name", runs(is_new=False))
def test_the_block_runs_as_it_is_written(name: str, run: Any) -> None:
    warnings.filterwarnings("ignore", message="nemo_rl.* is deprecated")
    run(name, is_new=False)


@pytest.mark.parametrize("name", runs(is_new=True))
def test_the_block_runs_under_the_new_names(name: str, run: Any) -> None:
    warnings.filterwarnings("error", message="nemo_rl.* is deprecated")
    run(name, is_new=True)


@pytest.mark.parametrize("name", [name for name, use in world.USES.items() if use.not_run])
def test_what_is_said_to_be_no_python_is_none(name: str) -> None:
    with pytest.raises(SyntaxError):
        compile(BLOCKS[name], name, "exec")


def test_every_block_is_run_or_has_a_reason() -> None:
    assert set(world.USES) == set(BLOCKS)
    assert sum(bool(use.not_run) for use in world.USES.values()) == 4
    assert sum(bool(use.not_new) for use in world.USES.values()) == 4


def test_the_documents_are_those_that_were_given() -> None:
    for name, (count, digest) in DOCUMENTS.items():
        assert sum(block.startswith(f"{name}:") for block in BLOCKS) == count
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
    assert {path.name for path in FOLDER.glob("*.md")} == set(DOCUMENTS)


def test_nothing_old_is_left_under_the_new_names() -> None:
    for source in BLOCKS.values():
        code = "\n".join(line.partition("#")[0] for line in under_new_names(source).splitlines())
        assert "nemo_rl" not in code
    assert set(OWN_PACKAGE.values()) == {"nemorl_myalgo"}
