"""What a run's plugin policy decides holds in every thread and process: plugins travel by their full id."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from installed_plugins import Install
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.plugins import Index, Registry
from nemorl.weights import WeightHandle
from nemorl_testing.plugin import use_registry

TRANSPORT = """
    from nemorl.plugins.kinds import WeightTransportConfig

    class Rival(WeightTransportConfig):
        "A transport of the same name as another one."

        reach = "cluster"

        def build(self):
            return self

        def fetch(self, payload):
            yield {{"from": "{name}"}}
"""


@pytest.fixture
def rivals(install: Install) -> Any:
    """Two distributions with a transport ``shared_memory``: nemorl's own and acme's."""
    code = TRANSPORT.format(name="acme")
    install("acme-rival", {"shared_memory": "acme_rival:Rival"}, group="weight_transports", code=code)
    with use_registry(Registry(Index.installed())) as registry:
        yield registry


def config(model: Path, **plugins: Any) -> Any:
    return load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "cluster": {
                "launcher": "ray",
                "colocated": False,
                "workers_per_node": 2,
                "weight_transport": "shared_memory",
            },
            "plugins": plugins,
        }
    )


def test_a_name_of_two_is_refused_until_the_run_chooses(rivals: Registry, tiny_model: Path) -> None:
    with pytest.raises(ConfigError):
        config(tiny_model)
    prefer = {"weight_transports.shared_memory": "acme-rival"}
    assert config(tiny_model, prefer=prefer).place().transport == "acme-rival:shared_memory"


def test_a_thread_and_another_process_fetch_by_the_transport_that_was_chosen(
    rivals: Registry, tiny_model: Path
) -> None:
    chosen = config(tiny_model, prefer={"weight_transports.shared_memory": "acme-rival"}).place().transport
    arrived = pickle.loads(pickle.dumps(WeightHandle(chosen, 1, None)))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(arrived.buckets()))
    thread.start()
    thread.join()
    assert found == [{"from": "acme"}]


def test_a_policy_given_in_python_decides_what_names_mean(rivals: Registry, tiny_model: Path, install: Install) -> None:
    from nemorl import GRPOConfig  # type: ignore[attr-defined]

    install("acme-math", {"math": "acme_math:Env"})
    with use_registry(Registry(Index.installed())):
        mine = GRPOConfig(
            model=str(tiny_model), environment="math", plugins={"prefer": {"environments.math": "acme-math"}}
        )
        assert type(mine.environment).__module__ == "acme_math"
