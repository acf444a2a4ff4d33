"""Parts that only this process knows: functions and classes by decorator, in configs, in runs and in workers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import nemorl
import pytest
import registered_parts as parts
from nemorl.config.load import validate
from nemorl.errors import BackendError, ConfigError, PluginError, PluginNotFoundError
from nemorl.plugins import Index, PluginPolicy, Registry
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.plugins.registry import registry as process_registry
from nemorl.resources.worker import WorkerContext
from nemorl.types import Prompt
from nemorl_cli.console import Console
from nemorl_rl.placement.engines import GenerationFactory
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

pytestmark = pytest.mark.usefixtures("scoped")


@pytest.fixture
def scoped() -> Iterator[Registry]:
    """Registrations end with the test."""
    with use_registry(Registry(Index.installed())) as registry:
        yield registry


def grpo(model: Path, **changes: Any) -> Any:
    settings = {
        "model": str(model),
        "max_steps": 1,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "generation": {"max_new_tokens": 3},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "export": False},
        **changes,
    }
    return validate(nemorl.GRPOConfig, settings)


def fit(config: Any, **options: Any) -> Any:
    return config.build().fit(console=Console(quiet=True), **options)


# One kind after another


def test_a_reward_function_is_an_environment_by_name(scoped: Registry) -> None:
    assert nemorl.register_environment("shouting")(parts.shouting) is parts.shouting
    config_class = scoped.load("environments", "shouting")
    assert issubclass(config_class, EnvironmentConfig)
    assert config_class.summary == "Reward 1 for capitals."
    environment = config_class().build()
    assert environment.score(Prompt(0, "hi", ()), "HI") == 1.0
    entry = scoped.index.find("environments", "shouting")
    assert entry.distribution == f"registered in {parts.__name__}"


def test_an_environment_class_has_its_arguments_as_options(tiny_model: Path, raises: Raises) -> None:
    nemorl.register_environment("bonus")(parts.Bonus)
    config = grpo(tiny_model, environment={"name": "bonus", "bonus": 2})
    environment = config.environment.build()
    assert (environment.bonus, environment.word) == (2.0, "1")
    assert config.model_dump(mode="json")["environment"] == {"name": "bonus", "bonus": 2.0, "word": "1"}
    with raises(ConfigError, "'word'", path=["environment.bonus", "environment.wrod"]):
        grpo(tiny_model, environment={"name": "bonus", "wrod": "x"})


def test_a_function_without_splits_has_train_rows(scoped: Registry) -> None:
    nemorl.register_dataset("squares")(parts.squares)
    config = validate(scoped.load("datasets", "squares"), {"count": 2})
    assert config.build("train") == parts.squares(2)
    assert config.build("validation") is None


def test_a_function_with_splits_decides_itself(scoped: Registry) -> None:
    nemorl.register_dataset("halves")(parts.halves)
    config = validate(scoped.load("datasets", "halves"), {"start": 3})
    assert config.build("train") == [{"prompt": "3/2="}]
    assert config.build("validation") == [{"prompt": "4/2="}, {"prompt": "5/2="}]
    assert config.build("test") is None


def test_a_run_uses_registered_parts_by_name(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    nemorl.register_environment("bonus")(parts.Bonus)
    nemorl.register_dataset("squares")(parts.squares)
    nemorl.register_logger("notes")(parts.Notes)
    nemorl.register_logger("count")(lambda metrics, step: seen.append(step))
    nemorl.register_generation_backend("parrot")(parts.Parrot)
    config = grpo(
        tiny_model,
        run_dir=str(tmp_path / "run"),
        data={"name": "squares", "count": 5},
        environment={"name": "bonus", "bonus": 0.5, "word": ""},
        generation={"backend": {"name": "parrot", "repeat": 3}, "max_new_tokens": 3},
        rollouts={"mismatch_limit": None},  # a parrot has no idea of the policy's probabilities
        loggers=["notes", "count"],
    )
    result = fit(config)
    assert result.metrics["train/reward"] == 0.5
    assert result.metrics["train/mean_gen_tokens_per_sample"] == 3
    assert (tmp_path / "run/notes.txt").read_text().splitlines()[-1] == "closed"
    assert seen == [1]
    # The resolved config loads again where the same parts are registered.
    again = nemorl.load_config(tmp_path / "run/config.yaml")
    assert again.generation == config.generation


def test_a_trainer_class_is_an_algorithm(tiny_model: Path, tmp_path: Path) -> None:
    from nemorl_grpo.trainer import GRPOTrainer

    @nemorl.register_algorithm("patient")
    class PatientTrainer(GRPOTrainer):
        """GRPO that counts its steps."""

        steps_seen: ClassVar[int] = 0

        def train_step(self, rows: Any) -> Any:
            PatientTrainer.steps_seen += 1
            return super().train_step(rows)

    config = nemorl.load_config(
        {"algorithm": "patient", **grpo(tiny_model, run_dir=str(tmp_path)).model_dump(exclude={"algorithm", "model"})}
    )
    assert type(config).__name__ == "PatientConfig"
    assert fit(config, dataset=parts.squares(4), reward_fn=parts.shouting).steps == 1
    assert PatientTrainer.steps_seen == 1
    assert PatientTrainer.from_pretrained("some/model").config.algorithm == "patient"
    assert nemorl.PatientConfig is type(config)
    assert nemorl.GRPOTrainer is GRPOTrainer
    assert nemorl.GRPOTrainer.config_class is nemorl.GRPOConfig


def test_backends_are_found_by_name(raises: Raises) -> None:
    assert nemorl.get_training_backend("dtensor").__name__ == "DTensorConfig"
    assert nemorl.get_generation_backend("hf").__module__ == "nemorl_dtensor.config"
    nemorl.register_generation_backend("parrot")(parts.Parrot)
    backend = nemorl.get_generation_backend("parrot")
    assert backend.weight_transports == parts.Parrot.weight_transports
    assert list(backend.model_fields) == ["token", "repeat"]
    with raises(PluginNotFoundError, "parot", "parrot"):
        nemorl.get_generation_backend("parot")


def test_a_backend_of_the_guides_shape_is_made_then_set_up(tiny_model: Path) -> None:
    assert nemorl.register_training_backend("guide")(parts.GuideBackend) is parts.GuideBackend
    config_class = nemorl.get_training_backend("guide")
    assert (config_class.summary, config_class.supports) == ("as in the guide", {"packing"})
    policy = nemorl.PolicyConfig(model_name=str(tiny_model))
    backend: Any = config_class().build(policy, WorkerContext(), reference=False)
    assert isinstance(backend, parts.GuideBackend)
    assert backend.model == str(tiny_model)


# Names


def test_a_name_that_is_taken_is_refused_with_both_named(raises: Raises) -> None:
    with raises(PluginError, "math", "nemorl_math_env", "nemorl-math-env", f"{parts.__name__}:shouting"):
        nemorl.register_environment("math")(parts.shouting)
    nemorl.register_environment("mine")(parts.shouting)
    with raises(PluginError, "mine", "Bonus"):
        nemorl.register_environment("mine")(parts.Bonus)


def test_the_same_definition_again_replaces_the_first(scoped: Registry) -> None:
    def cell(value: float) -> None:
        """What running a notebook cell twice does."""

        @nemorl.register_environment("mine")
        def reward(prompt: str, response: str) -> float:
            return value

    for value in (1.0, 2.0):
        cell(value)
        assert scoped.load("environments", "mine")().build().score(Prompt(0, "", ()), "") == value
    assert len([entry for entry in scoped.index.of_kind("environments") if entry.name == "mine"]) == 1


def test_a_runs_plugin_policy_keeps_what_is_registered() -> None:
    nemorl.register_environment("local")(lambda prompt, response: 1.0)
    with use_registry(process_registry().restricted(PluginPolicy())) as narrow:
        config = narrow.load("environments", "local")()
        assert narrow.name_of("environments", type(config)) == "local"


@pytest.mark.parametrize(
    ("register", "target", "fact"),
    [
        (nemorl.register_environment, 7, 7),
        (nemorl.register_environment, lambda response: 1.0, 1),
        (nemorl.register_algorithm, parts.shouting, "algorithm"),
        (nemorl.register_dataset, lambda name="x": [], "`name`"),
    ],
)
def test_what_cannot_be_a_part_is_refused_at_once(register: Any, target: Any, fact: object, raises: Raises) -> None:
    with raises(nemorl.NemorlError, fact, "fix:"):
        register("odd")(target)


def test_a_setup_may_call_its_place_in_the_cluster_cluster(scoped: Registry) -> None:
    class Backend:
        def setup(self, config: Any, cluster: Any) -> None:
            self.given = config, cluster

    nemorl.register_training_backend("custom")(Backend)
    policy, worker = nemorl.PolicyConfig(), WorkerContext(rank=3)
    assert scoped.load("training_backends", "custom")().build(policy, worker, reference=False).given == (policy, worker)


# Other processes


def test_a_generated_config_travels_by_the_name_of_what_it_wraps(scoped: Registry) -> None:
    nemorl.register_environment("bonus")(parts.Bonus)
    config = scoped.load("environments", "bonus")(bonus=3)
    sent = pickle.dumps(config)
    assert pickle.loads(sent) == config
    assert b"registered_parts" in sent
    code = "import pickle, sys; config = pickle.load(sys.stdin.buffer); print(config.build().bonus, config.word)"
    environment = {**os.environ, "PYTHONPATH": str(Path(parts.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True, env=environment)
    assert done.stdout.split() == [b"3.0", b"1"]


SCRIPT = """
import json, os, sys
from typing import ClassVar
import nemorl
import ray
import registered_parts
from nemorl.config import ClusterConfig
from nemorl_cli.console import Console
from nemorl.plugins.kinds import GenerationBackendConfig
from nemorl.resources.ray_session import RaySession
from nemorl.types import Completion

TOKEN = 7  # a global of the script travels too


class Echo:
    "A backend that only this script knows."
    weight_transports = ("shared_memory", "object_store")

    def __init__(self, worker, repeat: int = 2):
        self.said = (TOKEN,) * repeat

    def generate(self, requests):
        return [[Completion(self.said, (-0.5,) * len(self.said), "stop") for _ in r.seeds] for r in requests]

    def update_weights(self, handle, version):
        pass

    def shutdown(self):
        pass


class EchoConfig(GenerationBackendConfig):
    "A config class that only this script knows."
    weight_transports: ClassVar = ("shared_memory", "object_store")
    repeat: int = 3
    "Tokens."

    def build(self, generation, policy, worker, weights):
        return Echo(worker, self.repeat)


@ray.remote(num_cpus=0.1)
class Actor:
    def build(self, config, policy):
        backend = config.build(None, policy, None, None)
        return [type(backend).__name__, len(backend.said), os.getpid()]


if __name__ == "__main__":
    session = RaySession(ClusterConfig(launcher="ray"))
    nemorl.register_generation_backend("parrot")(registered_parts.Parrot)
    parrot = nemorl.get_generation_backend("parrot")(repeat=4)
    *built, process = ray.get(Actor.remote().build.remote(parrot, nemorl.PolicyConfig(model_name="none")), timeout=120)
    assert process != os.getpid()
    nemorl.register_generation_backend("wrapped")(Echo)
    nemorl.register_generation_backend("written")(EchoConfig)
    lengths = {}
    for name in ("wrapped", "written"):
        result = nemorl.GRPOTrainer.from_pretrained(
            sys.argv[1], run_dir=f"{sys.argv[2]}/{name}", max_steps=1, num_prompts_per_step=2,
            num_generations_per_prompt=2, policy={"init": "random", "max_sequence_tokens": 32},
            generation={"backend": name, "max_new_tokens": 4}, rollouts={"mismatch_limit": None},
            cluster={"launcher": "ray", "gpus_per_node": 0, "cpus_per_worker": 0.5},
            validation={"every": 0, "at_end": False}, checkpoint={"export": False},
        ).fit([{"prompt": "1"}] * 4, lambda prompt, response: 1.0, console=Console(quiet=True))
        lengths[name] = result.metrics["train/mean_gen_tokens_per_sample"]
    session.close()
    print(json.dumps([built, lengths]))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.full
def test_what_only_a_script_knows_works_in_ray_workers(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    shutil.copy(parts.__file__, tmp_path)  # beside the script, where workers look too
    command = [sys.executable, str(script), str(tiny_model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["Parrot", 4], {"wrapped": 2.0, "written": 3.0}]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("private_ray")
def test_a_module_that_workers_cannot_import_is_named(tiny_model: Path, raises: Raises) -> None:
    from nemorl.resources.ray_cluster import RayVirtualCluster
    from nemorl.resources.ray_workers import RayWorkerGroup

    nemorl.register_generation_backend("parrot")(parts.Parrot)
    backend = nemorl.get_generation_backend("parrot")()
    policy = nemorl.PolicyConfig(model_name=str(tiny_model))
    factory = GenerationFactory(nemorl.GenerationConfig(backend=backend), policy, None)
    cluster = RayVirtualCluster([1], nemorl.ClusterConfig(launcher="ray", gpus_per_node=0, cpus_per_worker=0.5))
    try:
        with raises(BackendError, "registered_parts"):
            RayWorkerGroup(cluster, factory)
    finally:
        cluster.shutdown()
