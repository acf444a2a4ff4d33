"""Runs that lose engines or are given more, through the real command line: the same numbers as undisturbed ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from elastic_runs import Kill, apart, deaths, learnt, settings, train
from nemorl.config import ClusterConfig
from nemorl.config.load import load_config
from nemorl.errors import ResourceError
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl_cli.console import Console
from recorded_messages import Raises
from small_runs import weights

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PATIENCE_S = 240.0
REWARD = """
def digits(prompt, response):
    return float(sum(character.isdigit() for character in response))
"""


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In one process."""
    result = train(tiny_model, tmp_path_factory.mktemp("one") / "run", {"gpus_per_node": 0})
    return learnt(result.history), weights(result)


@pytest.mark.usefixtures("private_ray")
def test_a_run_that_loses_half_of_its_engines_in_mid_step_goes_on_with_the_rest(
    undisturbed: Any, tiny_model: Path, tmp_path: Path
) -> None:
    killer = Kill(2, slice(0, 2))
    result = train(tiny_model, tmp_path / "run", apart(4), killer)
    assert (learnt(result.history), weights(result)) == undisturbed
    assert deaths(tmp_path / "run") == 2
    assert [engines for engines, _ in killer.steps][:3] == [4, 4, 2]  # nobody waits for a new process


@pytest.mark.usefixtures("private_ray")
def test_a_run_that_loses_all_of_them_waits_for_the_first_that_is_back(
    undisturbed: Any, tiny_model: Path, tmp_path: Path
) -> None:
    result = train(tiny_model, tmp_path / "run", apart(2), Kill(2, slice(0, 2)))
    assert (learnt(result.history), weights(result)) == undisturbed
    assert deaths(tmp_path / "run") == 2


@pytest.mark.usefixtures("private_ray")
@pytest.mark.full
def test_an_asynchronous_run_that_loses_half_of_its_engines_skips_and_repeats_no_step(
    tiny_model: Path, tmp_path: Path
) -> None:
    rollouts = {"mode": "async", "max_staleness": 1}
    result = train(tiny_model, tmp_path / "run", apart(2), Kill(3, slice(0, 1)), rollouts=rollouts, max_steps=8)
    found = learnt(result.history)
    assert [record["step"] for record in found] == list(range(1, 9))
    assert {record["train/num_samples"] for record in found} == {32.0}
    assert max(record["train/max_trajectory_age"] for record in result.history if "train/loss" in record) <= 1
    assert "engine-0 is lost" in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.usefixtures("private_ray")
def test_places_of_single_engines_are_refused_together_and_given_back_one_by_one(raises: Raises) -> None:
    cores = len(os.sched_getaffinity(0))
    config = ClusterConfig(launcher="ray", workers_per_node=1, placement_timeout_s=30)

    def free() -> float:
        return float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]

    def places(count: int) -> list[RayVirtualCluster]:
        return RayVirtualCluster.single_places(count, config, devices_per_worker=1, role="generation")

    with raises(ResourceError, cores + 1, varies=r".+"):
        places(cores + 1)
    found = places(cores)
    assert all(one.is_there for one in found)
    assert {place.index for one in found for place in one.places} == {0}
    found[0].shutdown()
    again = places(1)[0]  # what is free is one place
    for one in (again, *found[1:]):
        one.shutdown()
    end = time.monotonic() + 30
    while free() < cores:
        assert time.monotonic() < end
        time.sleep(0.05)


def nemorl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nemorl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@contextmanager
def running(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``nemorl train``, ended in an orderly way."""
    with config.with_suffix(".log").open("wb") as log:
        run = subprocess.Popen([sys.executable, "-m", "nemorl", "train", str(config)], stdout=log, stderr=log)
        try:
            yield run
            run.send_signal(signal.SIGINT)
            assert run.wait(PATIENCE_S) == 0, config.with_suffix(".log").read_text()
        finally:
            run.kill()
            run.wait()


def awaited(look: Callable[[], Any], run: subprocess.Popen[bytes]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < end
        assert run.poll() is None
        time.sleep(0.2)
    return found


@pytest.mark.full
def test_engines_are_added_and_dropped_through_the_command_line_while_a_run_is_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    run_dir, config = tmp_path / "run", tmp_path / "run.json"
    (tmp_path / "reward.py").write_text(REWARD)
    world = {"data": "arithmetic", "environment": f"{tmp_path / 'reward.py'}:digits", "max_steps": 100_000}
    config.write_text(json.dumps({"algorithm": "grpo", **settings(tiny_model, run_dir, apart(1), **world)}))

    def engines() -> dict[str, str]:
        done = nemorl("engines", "list", run_dir, "--json")
        return {} if done.returncode else {one["name"]: one["state"] for one in json.loads(done.stdout)["engines"]}

    def steps() -> int:
        file = run_dir / "metrics.jsonl"
        return file.read_text().count("train/loss") if file.is_file() else 0

    with running(config) as run:
        awaited(steps, run)
        refused = nemorl("engines", "add", run_dir, "--count", 1000)
        assert (refused.returncode, "1000" in refused.stderr) == (2, True), refused
        added = nemorl("engines", "add", run_dir, "--count", 2, "--json")
        assert json.loads(added.stdout) == {"added": ["engine-1", "engine-2"]}, added
        awaited(lambda: list(engines().values()) == ["ready"] * 3, run)
        served = awaited(lambda: steps() + 3, run)
        awaited(lambda: steps() >= served, run)
        assert json.loads(nemorl("engines", "drop", run_dir, "engine-0", "--json").stdout) == {"dropped": ["engine-0"]}
        awaited(lambda: list(engines()) == ["engine-1", "engine-2"], run)
        assert nemorl("engines", "drop", run_dir, "engine-0").returncode == 2
        last = steps() + 3
        awaited(lambda: steps() >= last, run)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = learnt(records)
    assert nemorl("engines", "drop", run_dir, "engine-1").returncode == 2  # it has ended
    assert [record["step"] for record in found] == list(range(1, len(found) + 1))
    alone = settings(tiny_model, tmp_path / "alone", {"gpus_per_node": 0}, **{**world, "max_steps": len(found)})
    result = load_config({"algorithm": "grpo", **alone}).build().fit(console=Console(quiet=True))
    assert found == learnt(result.history)
