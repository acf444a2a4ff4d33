"""What is said when vLLM cannot be imported. A module of that name stands in for the broken installation."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nemorl.errors import BackendError
from recorded_messages import Raises

environment = pytest.importorskip("nemorl_vllm.environment", reason="nemorl-vllm is not installed")


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that ``import vllm`` runs; environment and modules are restored."""
    before = dict(os.environ)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("vllm", "vllm.envs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "vllm.py"
    for name in ("vllm", "vllm.envs"):
        sys.modules.pop(name, None)  # the false one: others may want the real one after this
    os.environ.clear()
    os.environ.update(before)


def test_a_torchvision_of_another_torch_is_named_with_its_cure(broken: Path, raises: Raises) -> None:
    broken.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    with raises(BackendError):
        environment.import_vllm()


def test_a_model_whose_code_needs_torchvision_says_so(monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    message = "Model architectures ['Qwen3VLForConditionalGeneration'] failed to be inspected."
    with raises(BackendError, "torchvision", torch.__version__), environment.process_state_kept("cpu"):
        raise ValueError(message)


def test_a_missing_dependency_of_vllm_is_not_taken_for_a_missing_vllm(broken: Path, raises: Raises) -> None:
    broken.write_text("import a_module_that_vllm_needs")
    with raises(BackendError, "a_module_that_vllm_needs"):
        environment.import_vllm()


def test_a_missing_vllm_is_said_with_how_to_install_it(
    broken: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with raises(BackendError, "vLLM", "nemorl-vllm"):
        environment.import_vllm()


def test_the_import_is_prepared_and_the_users_own_settings_win(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    package = broken.with_suffix("")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "envs.py").write_text(
        "is_cached = True\ndef disable_envs_cache():\n    global is_cached; is_cached = False"
    )
    environment.import_vllm()
    assert not sys.modules["vllm.envs"].is_cached
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
