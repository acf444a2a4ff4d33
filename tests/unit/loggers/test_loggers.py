"""The loggers: TensorBoard for real; wandb, SwanLab and MLflow against stubs that record the calls made to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from nemorl.contracts import Logger
from nemorl.plugins.kinds import LoggerConfig
from nemorl_insight.loggers import MLflowConfig, SwanLabConfig, TensorBoardConfig, WandbConfig

METRICS = {"train/reward": 0.5, "validation/pass@4": 0.25}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: grpo\nseed: 1\n")
    return folder


def _import_anew(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Have it imported beside a stub, and forgotten afterwards: whoever imports it next must not meet the stub."""
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # so that there is something to take back
    monkeypatch.delitem(sys.modules, module)


@pytest.fixture
def wandb_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []

    class Run:
        id = "abc123"

        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append(("log", (metrics, step)))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**options: Any) -> Run:
        calls.append(("init", options))
        return Run()

    stub = ModuleType("wandb")
    stub.init, stub.Settings = init, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stub)
    _import_anew(monkeypatch, "nemorl_insight.loggers.wandb")
    return calls


@pytest.fixture
def swanlab_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """SwanLab's published interface (0.10): the keywords of ``init``; what it returns logs and finishes."""
    calls: list[tuple[str, Any]] = []

    class Run:
        id = "abc123"

        def log(self, data: dict[str, float], step: int | None = None) -> None:
            calls.append(("log", (data, step)))

        def finish(self, state: str = "success", error: str | None = None) -> None:
            calls.append(("finish", state))

    def init(*, project: str, workspace: str | None, name: str, tags: list[str], mode: str | None, log_dir: str,
             id: str | None, resume: str | None, config: dict[str, Any]) -> Run:  # fmt: skip
        calls.append(("init", {"mode": mode, "name": name, "id": id, "resume": resume, "config": config}))
        return Run()

    stub = ModuleType("swanlab")
    stub.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swanlab", stub)
    _import_anew(monkeypatch, "nemorl_insight.loggers.swanlab")
    return calls


@pytest.fixture
def mlflow_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []

    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            calls.append(("create_experiment", name))
            return "7"

        def create_run(self, experiment_id: str, run_name: str) -> Any:
            calls.append(("create_run", (experiment_id, run_name)))
            return SimpleNamespace(info=SimpleNamespace(run_id="run-1"))

        def update_run(self, run_id: str, status: str) -> None:
            calls.append(("update_run", (run_id, status)))

        def log_batch(self, run_id: str, metrics: list[Any]) -> None:
            calls.append(("log_batch", (run_id, metrics)))

        def set_terminated(self, run_id: str) -> None:
            calls.append(("set_terminated", run_id))

    stub, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    stub.MlflowClient = Client  # type: ignore[attr-defined]
    entities.Metric = lambda key, value, timestamp, step: (key, value, step)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", stub)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    _import_anew(monkeypatch, "nemorl_insight.loggers.mlflow")
    return calls


def log_twice_and_close(logger: Logger) -> None:
    logger.log(METRICS, 1)
    logger.log(METRICS, 2)
    logger.close()
    logger.close()


def test_tensorboard_files_hold_every_scalar_at_its_step(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice_and_close(TensorBoardConfig().build(run_dir))
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars == {"train/reward": [(1, 0.5), (2, 0.5)], "validation/pass@4": [(1, 0.25), (2, 0.25)]}


@pytest.mark.slow
def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; import nemorl_insight.loggers; assert 'tensorboard' not in sys.modules\n"
        "logger = nemorl_insight.loggers.TensorBoardConfig().build(pathlib.Path(sys.argv[1]))\n"
        "logger.log({'a': 1.0}, 1); logger.close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_wandb_gets_the_run_and_its_metrics(run_dir: Path, wandb_calls: list[tuple[str, Any]]) -> None:
    log_twice_and_close(WandbConfig(project="p", mode="offline", tags=("a",)).build(run_dir))
    assert [name for name, _ in wandb_calls] == ["init", "log", "log", "finish"]
    options = wandb_calls[0][1]
    assert options["mode"] == "offline"
    assert options["name"] == "my-run"
    assert options["config"] == {"algorithm": "grpo", "seed": 1}
    assert options["id"] is None
    assert wandb_calls[2][1] == (METRICS, 2)


def test_a_resumed_run_continues_its_wandb_run(run_dir: Path, wandb_calls: list[tuple[str, Any]]) -> None:
    for _ in range(2):
        WandbConfig().build(run_dir).close()
    second = wandb_calls[2][1]
    assert (second["id"], second["resume"]) == ("abc123", "allow")


def test_swanlab_gets_the_run_and_its_metrics(run_dir: Path, swanlab_calls: list[tuple[str, Any]]) -> None:
    log_twice_and_close(SwanLabConfig(mode="offline").build(run_dir))
    config = {"algorithm": "grpo", "seed": 1}
    assert swanlab_calls == [
        ("init", {"mode": "offline", "name": "my-run", "id": None, "resume": None, "config": config}),
        ("log", (METRICS, 1)),
        ("log", (METRICS, 2)),
        ("finish", "success"),
    ]


def test_a_resumed_run_continues_its_swanlab_run(run_dir: Path, swanlab_calls: list[tuple[str, Any]]) -> None:
    for _ in range(2):
        SwanLabConfig().build(run_dir).close()
    second = swanlab_calls[2][1]
    assert (second["id"], second["resume"]) == ("abc123", "allow")


def test_swanlab_itself_takes_what_it_is_given(run_dir: Path) -> None:
    pytest.importorskip("swanlab", reason="an optional extra")
    for _ in range(2):  # the second time as a resumed run
        log_twice_and_close(SwanLabConfig(mode="offline", tags=("a",)).build(run_dir))
    assert (run_dir / "swanlab-run-id").read_text().strip()
    assert any((run_dir / "swanlab").rglob("*"))


def test_mlflow_gets_the_run_and_its_metrics(run_dir: Path, mlflow_calls: list[tuple[str, Any]]) -> None:
    log_twice_and_close(MLflowConfig(experiment="e", tracking_uri="https://host:5000").build(run_dir))
    # MLflow allows no "@" in names.
    batch = [("train/reward", 0.5, 2), ("validation/pass_4", 0.25, 2)]
    assert mlflow_calls[0] == ("client", "https://host:5000")
    assert ("create_experiment", "e") in mlflow_calls
    assert ("create_run", ("7", "my-run")) in mlflow_calls
    assert mlflow_calls[-2:] == [("log_batch", ("run-1", batch)), ("set_terminated", "run-1")]


def test_a_resumed_run_continues_its_mlflow_run(run_dir: Path, mlflow_calls: list[tuple[str, Any]]) -> None:
    for _ in range(2):
        MLflowConfig().build(run_dir).close()
    assert [name for name, _ in mlflow_calls].count("create_run") == 1
    assert ("update_run", ("run-1", "RUNNING")) in mlflow_calls


@pytest.mark.parametrize("config", [TensorBoardConfig, WandbConfig, SwanLabConfig, MLflowConfig])
def test_every_logger_says_what_it_is_and_how_to_install_it(config: type[LoggerConfig]) -> None:
    assert config.summary
    assert config.install_hint.startswith("pip install ")
    assert all(option["description"] for option in config.describe_options())
