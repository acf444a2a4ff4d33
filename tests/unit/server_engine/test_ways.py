"""How servers get new weights: the way is chosen by what they offer, and what cannot work is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_vllm import weights_of
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_agents.servers import ServerConfig
from nemorl_agents.servers.dialects import dialect
from nemorl_agents.servers.dialects.base import Facts
from nemorl_agents.servers.ways import Way, chosen_way

REQUESTS = [GenerationRequest((9, 10), SamplingParams(max_new_tokens=6), (0, 1))]
HERE, OTHER, FAR = "http://127.0.0.1:8000", "http://127.0.0.1:8001", "https://node7:8000"
ALL: frozenset[Way] = frozenset({"folder", "distributed", "tensor"})


def test_weights_are_broadcast_where_all_servers_take_tensors(serve: Any, build: Any, tmp_path: Path) -> None:
    servers = serve(takes_tensors=True), serve(takes_tensors=True)
    engine = build(*servers, value=3.0, weights="distributed")
    assert [server.weights for server in servers] == [3.0, 3.0]
    engine.update_weights(weights_of(4.0, 2), 2)
    assert [server.weights for server in servers] == [4.0, 4.0]
    assert [server.loads for server in servers] == [["w", "w"]] * 2
    assert engine.remarks() == ["servers get new weights by distributed: generation.backend.weights is distributed"]
    assert not (tmp_path / "run" / "scratch" / "engines" / "weights").exists()  # nothing was written


@pytest.mark.parametrize("chosen", [{"weights": "folder"}, {"weights_folder": "shared"}])
def test_a_folder_is_used_where_the_config_says_so(serve: Any, build: Any, tmp_path: Path, chosen: Any) -> None:
    if "weights_folder" in chosen:
        chosen = {"weights_folder": tmp_path / "shared"}
    server = serve(takes_tensors=True)
    build(server, value=3.0, **chosen)
    assert server.loads == ["weights_000001"]


def test_a_folder_is_used_where_one_server_takes_no_tensors() -> None:
    offers: dict[str, frozenset[Way]] = {HERE: frozenset({"folder", "distributed"}), OTHER: frozenset({"folder"})}
    facts = {url: Facts("1", "model", ways=ways) for url, ways in offers.items()}
    way, why = chosen_way(ServerConfig(urls=(HERE, OTHER)), dialect("vllm"), facts, "cuda:0")
    assert way == "folder"
    assert why.startswith(f"{OTHER} does not offer weights: distributed; ")


def test_on_one_machine_without_a_gpu_weights_go_as_files(serve: Any, build: Any) -> None:
    servers = serve(takes_tensors=True), serve(takes_tensors=True)
    engine = build(*servers, value=3.0)
    assert [server.loads for server in servers] == [["weights_000001"]] * 2
    assert "one machine and no GPU" in engine.remarks()[0]


def test_a_server_that_joined_from_another_machine_is_asked_for_like_those_of_the_config() -> None:
    offers = {HERE: Facts("1", "model", ways=ALL), FAR: Facts("1", "model", ways=ALL)}
    config = {"urls": [HERE], "plaintext": True}
    way, _ = chosen_way(ServerConfig.model_validate(config), dialect("vllm"), offers, "cpu")
    assert way == "distributed"  # not on one machine
    way, why = chosen_way(ServerConfig(urls=(HERE,)), dialect("vllm"), offers, "cpu")
    assert (way, why) == (
        "folder",
        f"distributed sends the weights to {FAR} unencrypted; "
        f"tensor hands over memory of this machine's GPU, and {FAR} is another machine",
    )


def test_a_replaced_server_is_sent_the_weights_through_another_group(serve: Any, build: Any) -> None:
    server = serve(takes_tensors=True)
    engine = build(server, value=3.0, weights="distributed")
    wanted = engine.generate(REQUESTS)
    server.kill()
    replacement = serve(server.port, takes_tensors=True)
    assert engine.generate(REQUESTS) == wanted
    assert (replacement.weights, replacement.loads) == (3.0, ["w"])


def test_a_server_that_takes_no_tensors_cannot_join_a_run_that_sends_them(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    with raises(BackendError, "distributed", "--weight-transfer-config", varies=r"127\.0\.0\.1:\d+|--port \d+"):
        build(server, weights="distributed")


def test_a_server_that_refuses_the_tensors_is_named_and_nobody_waits(serve: Any, build: Any, raises: Any) -> None:
    server = serve(takes_tensors=True)
    answer = server.reply
    server.reply = lambda path, body: (
        (400, {"error": "no such tensor"}) if path == "/update_weights" else answer(path, body)
    )
    with raises(BackendError, "distributed", varies=r"127\.0\.0\.1:\d+|--port \d+"):
        build(server, weights="distributed")
    assert server.calls[server.calls.index("/update_weights") + 1] == "/resume"  # it goes on


@pytest.mark.parametrize(
    ("engine", "options", "device", "words"),
    [
        ("vllm", {"urls": [FAR], "weights": "distributed"}, "cpu", "unencrypted"),
        ("vllm", {"urls": [FAR], "weights": "tensor"}, "cuda:0", "another machine"),
        ("sglang", {"urls": [HERE], "weights": "tensor"}, "cpu", "memory of a GPU"),
        ("tensorrt-llm", {"urls": [HERE], "weights": "folder"}, "cuda:0", "takes no weights by folder"),
        ("tensorrt-llm", {"urls": [HERE]}, "cpu", "memory of a GPU"),
    ],
)
def test_ways_that_cannot_work_are_refused_with_the_config(
    engine: str, options: Any, device: str, words: str, raises: Any
) -> None:
    config = ServerConfig.model_validate({"engine": engine, **options})
    [problem] = config.policy_problems(PolicyConfig(model_name="org/model"), device=device, is_attached=False)
    assert words in problem.message
    assert problem.fix is not None


@pytest.mark.parametrize(
    ("engine", "options", "device", "offered", "way"),
    [
        ("vllm", {"urls": [HERE]}, "cpu", {"folder"}, "folder"),
        ("vllm", {"urls": [HERE]}, "cpu", {"folder", "distributed"}, "folder"),  # faster on one machine
        ("vllm", {"urls": [HERE]}, "cpu", {"distributed"}, "distributed"),
        ("vllm", {"urls": [HERE]}, "cuda:0", {"folder", "distributed"}, "distributed"),
        ("vllm", {"urls": [FAR]}, "cpu", {"folder", "distributed"}, "folder"),  # it would go unencrypted
        ("vllm", {"urls": [FAR], "plaintext": True}, "cpu", {"folder", "distributed"}, "distributed"),
        ("vllm", {"urls": [HERE]}, "cuda:0", {"folder", "tensor"}, "tensor"),
        ("sglang", {"urls": [HERE], "weights_folder": "/shared"}, "cuda:0", ALL, "folder"),
        ("tensorrt-llm", {"urls": [HERE]}, "cuda:0", {"tensor"}, "tensor"),
    ],
)
def test_the_way_follows_from_what_servers_offer(
    engine: str, options: Any, device: str, offered: Any, way: str
) -> None:
    config = ServerConfig.model_validate({"engine": engine, **options})
    facts = Facts("1", "model", ways=frozenset(offered))
    assert chosen_way(config, dialect(engine), {HERE: facts}, device)[0] == way


def test_without_any_way_the_reasons_are_listed(raises: Any) -> None:
    config = ServerConfig(urls=(HERE,), engine="tensorrt-llm")
    with raises(BackendError, "GPU"):
        chosen_way(config, dialect("tensorrt-llm"), {HERE: Facts("1", "model", ways=frozenset({"tensor"}))}, "cpu")
