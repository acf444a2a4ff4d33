"""What all tests share: one thread, a tiny model written once per session, and a Ray for modules that need one."""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil
import pytest
from forked_workers import begun_by, python_that_forks

if TYPE_CHECKING:
    from nemorl.resources.ray_session import RaySession

# At the default, a fifth of the time goes into looking for garbage among what torch and 8,000 tests have made.
gc.set_threshold(100_000, 20, 20)

pytest_plugins = ["recorded_messages", "tiers"]

# Under nohup the one is ignored, in a shell's background the other, by what tests start as well, and some send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["NEMORL_AUDIT"] = "off"  # tests of the audit log name a folder

MOST_THREADS = 60
"""Of a process that holds no process groups of models any more."""
NEED_RAY = pytest.StashKey[set[str]]()
"""Node ids of modules with a test that uses ``private_ray``."""


def pytest_collection_modifyitems(session: pytest.Session, items: Sequence[pytest.Item]) -> None:
    in_need = [item for item in items if "private_ray" in getattr(item, "fixturenames", ())]
    session.stash[NEED_RAY] = {parent.nodeid for item in in_need if (parent := item.getparent(pytest.Module))}


def pytest_runtest_setup(item: pytest.Item) -> None:
    from nemorl_testing.plugin import why_no_gpu

    reason = why_no_gpu() if item.get_closest_marker("gpu") else None
    if reason is not None:
        pytest.skip(reason)


@pytest.hookimpl(trylast=True)  # after the fixtures of the module
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between modules, process groups that nobody uses end. Garbage keeps those of models, and the threads of each wake
    a hundred times a second: those of all tests of engines took one of two processors."""
    is_last = nextitem is None or nextitem.getparent(pytest.Module) is not item.getparent(pytest.Module)
    if is_last and psutil.Process().num_threads() > MOST_THREADS:
        gc.collect()


@pytest.fixture
def small_files_only() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which the system itself refuses to let any file of this process grow beyond so many bytes."""
    import resource

    @contextmanager
    def limited(limit: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged during a test, at any level."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 folder with a character tokenizer and no weights: use ``policy.init: random``."""
    from nemorl_rl.models.tiny import write_tiny_model

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"), **sizes)


class SharedRay:
    """One private Ray for modules that follow each other; its workers are forked."""

    def __init__(self) -> None:
        self._session: RaySession | None = None

    @property
    def is_open(self) -> bool:
        return self._session is not None

    def open(self, python: Path) -> None:
        from nemorl.config import ClusterConfig
        from nemorl.resources.ray_session import RaySession

        if self._session is None:
            with begun_by(python):
                self._session = RaySession(ClusterConfig(launcher="ray"))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


@pytest.fixture(scope="session")
def _shared_ray() -> SharedRay:
    return SharedRay()


@pytest.fixture(scope="session")
def python_of_workers(_shared_ray: SharedRay, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A Python whose Ray workers are forked: the one that a cluster is ``begun_by``."""
    needs_megatron = any(item.get_closest_marker("megatron") for item in request.session.items)
    modules = ["nemorl_megatron.training"] if needs_megatron else []
    with (
        TemporaryDirectory(prefix="nemorl-fork-") as folder,
        python_that_forks(Path(folder), modules=modules) as python,
    ):
        yield python
        _shared_ray.close()


@pytest.fixture(scope="module", autouse=True)
def _no_ray_is_left(request: pytest.FixtureRequest, _shared_ray: SharedRay) -> Iterator[None]:
    """A module that leaves Ray running would hand its devices and its address to all that come after it."""
    if request.node.nodeid not in request.session.stash[NEED_RAY]:
        _shared_ray.close()
    yield
    if (ray := sys.modules.get("ray")) and ray.is_initialized() and not _shared_ray.is_open:
        ray.shutdown()
        pytest.fail(f"{request.node.name} left Ray running")


@pytest.fixture
def weights_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``delta_folder`` puts weights."""
    monkeypatch.setenv("NEMORL_WEIGHTS_FOLDER", str(tmp_path / "shared"))
    return tmp_path / "shared"


@pytest.fixture(scope="module")
def private_ray(_shared_ray: SharedRay, python_of_workers: Path) -> None:
    """A Ray of this process alone. A module that needs none finds none."""
    _shared_ray.open(python_of_workers)
