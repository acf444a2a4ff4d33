"""Before a run starts its servers are asked what they are; ``nemorl engines`` changes them while it is on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemorl.errors import UsageError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_agents.servers.command import app
from nemorl_agents.servers.launch_check import server_problems
from nemorl_agents.servers.roster import Roster
from typer.testing import CliRunner


def run_config(tiny_model: Path, *urls: str, **generation: Any) -> Any:
    from nemorl_grpo.config import GRPOConfig

    return GRPOConfig(
        model=str(tiny_model),
        policy={"init": "random", "max_sequence_tokens": 64},
        generation={"backend": {"name": "server", "urls": list(urls)}, "max_new_tokens": 8, **generation},
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        max_steps=1,
        validation={"every": 0},
    )


def problems(config: Any, tmp_path: Path) -> tuple[list[str], list[str]]:
    """Paths of problems, and warnings."""
    warned: list[str] = []
    return [issue.path for issue in server_problems(config, tmp_path, warned.append)], warned


def test_servers_that_fit_are_no_problem_and_are_given_neither_weights_nor_work(
    serve: Any, tiny_model: Path, tmp_path: Path
) -> None:
    server = serve()
    assert problems(run_config(tiny_model, server.url), tmp_path) == ([], [])
    assert not server.loads
    assert not server.prompts


def test_a_server_that_does_not_fit_is_a_problem_of_its_address(serve: Any, tiny_model: Path, tmp_path: Path) -> None:
    fits, old = serve(), serve()
    old.version = "0.9.2"
    assert problems(run_config(tiny_model, fits.url, old.url), tmp_path) == (["generation.backend.urls.1"], [])


def test_a_server_that_only_fails_is_a_problem_of_its_address(serve: Any, tiny_model: Path, tmp_path: Path) -> None:
    server = serve()
    server.reply = lambda path, body: (500, {})
    assert problems(run_config(tiny_model, server.url), tmp_path) == (["generation.backend.urls.0"], [])


def test_sampling_that_a_server_cannot_report_is_a_problem(serve: Any, tiny_model: Path, tmp_path: Path) -> None:
    server = serve()
    server.mode = "raw_logprobs"
    assert problems(run_config(tiny_model, server.url, temperature=0.6), tmp_path)[0] == ["generation.backend.urls.0"]


def test_a_server_that_is_not_there_yet_is_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    found, [warning] = problems(run_config(tiny_model, "http://127.0.0.1:9"), tmp_path)
    assert not found
    assert "http://127.0.0.1:9" in warning


def test_several_generation_workers_are_a_problem(serve: Any, tiny_model: Path, tmp_path: Path) -> None:
    config, ray = run_config(tiny_model, serve().url), {"launcher": "ray", "workers_per_node": 2}
    for cluster, found in ((ray, ["cluster.generation_workers"]), ({**ray, "generation_workers": 1}, [])):
        several = type(config).model_validate({**config.model_dump(exclude_unset=True), "cluster": cluster})
        assert problems(several, tmp_path) == (found, [])


def test_runs_of_other_backends_are_asked_nothing(tiny_model: Path, tmp_path: Path) -> None:
    from nemorl_grpo.config import GRPOConfig

    assert problems(GRPOConfig(model=str(tiny_model)), tmp_path) == ([], [])


def test_engines_add_and_drop_change_what_the_run_wants(serve: Any, build: Any, tmp_path: Path) -> None:
    run, first, second = tmp_path / "run", serve(), serve()
    engine = build(first)
    engine.generate([GenerationRequest((9, 10), SamplingParams(max_new_tokens=4))])
    engine.shutdown()  # the state that it leaves is read like that of a run that is on
    assert json.loads(engines("list", run, "--json"))["servers"][0]["served"] == 1
    engines("add", run, second.url + "/")
    assert Roster(run / "scratch" / "engines").wanted([first.url]) == (first.url, second.url)
    assert second.url in engines("list", run)
    engines("drop", run, first.url)
    assert Roster(run / "scratch" / "engines").wanted([first.url]) == (second.url,)


def engines(verb: str, run: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, [verb, str(run), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_engines_says_what_is_wrong(serve: Any, build: Any, tmp_path: Path, raises: Any) -> None:
    from nemorl_agents.servers.command import add, drop, show

    with raises(UsageError, "generation.backend"):
        show(tmp_path / "nothing")
    server = serve()
    build(server).shutdown()
    with raises(UsageError, "node7:8000"):
        add(tmp_path / "run", "node7:8000")
    with raises(UsageError, "http://node7:8000", varies=r"127\.0\.0\.1:\d+"):
        drop(tmp_path / "run", "http://node7:8000")
