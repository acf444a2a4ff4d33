"""One real vLLM server, whose workers run nemorl-vllm's extension: the backend's whole contract, weights by each of the
ways that it offers, an update among responses, and a GRPO run in the middle of which it is killed and replaced.

The model has tied embeddings, whose output head vLLM on the CPU keeps stale where it loads weights by itself. A start
takes half a minute of a processor, so all of this shares one, and the last test ends it.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import BackendError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_agents.servers.versions import WeightVersions, WrittenWeights
from nemorl_testing import conformance
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from server_runs import changed, digits, handle_of, run, seen
from vllm_server import EXTENDED, VLLMServer, free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MODEL = tiny_model()
PORT = free_port()
Build = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    server = VLLMServer(MODEL, tmp_path_factory.mktemp("server") / "log", port=PORT, options=EXTENDED)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def _as_started(server: VLLMServer) -> None:
    """The server's weights have the name that they had at first: a generator without a trainer takes no run's."""
    body = json.dumps({"new_version": "default"}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/update_weight_version", body, headers)
    with suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=60):
        pass  # the last tests end the server


test_server = conformance(
    "generation_backends",
    {"name": "server", "urls": [f"http://127.0.0.1:{PORT}"]},
    skip={
        "weights_in_process_are_shared": "the engine is another process: it has a copy by nature",
        "running_requests_go_on_with_new_weights": "one row is answered before a busy machine pauses the server: below",
    },
)


@pytest.mark.parametrize("way", ["distributed", "folder"])
def test_new_weights_are_the_models_whatever_way_they_came(server: VLLMServer, build: Build, way: str) -> None:
    model = load_reference(MODEL)
    engine = build(MODEL, handle_of(model, 1), server, weights=way)
    engine.update_weights(handle_of(changed(model), 2), 2)
    request = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=20), (1, 2))
    [completions] = engine.generate([request])
    for completion in completions:
        true = response_logprobs(model, request.token_ids, completion.token_ids)
        assert max(abs(one - other) for one, other in zip(true, completion.logprobs, strict=True)) < 1e-4
    assert engine.remarks() == [f"servers get new weights by {way}: generation.backend.weights is {way}"]


def test_weights_that_change_while_a_server_answers_draw_the_tokens_that_follow(
    server: VLLMServer, build: Build
) -> None:
    models = changed(load_reference(MODEL)), load_reference(MODEL)  # of even and odd versions
    engine = build(MODEL, handle_of(models[1], 1), server)
    request = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=120), tuple(range(32)))
    short = replace(request, sampling=SamplingParams(max_new_tokens=2), seeds=(0,))
    for version in range(2, 12):  # a busy machine may begin, or end, all of them on one side of the update
        running = engine.submit(request)
        engine.submit(short).result(60)
        engine.update_weights(handle_of(models[version % 2], version), version)
        both = [found for found in running.result(120) if found.weight_versions == (version - 1, version)]
        if both:
            break
    assert both
    for completion in both[:8]:
        by_age = models[(version - 1) % 2], models[version % 2]
        true = [response_logprobs(weights, request.token_ids, completion.token_ids) for weights in by_age]
        by = [min((0, 1), key=lambda which: abs(true[which][at] - p)) for at, p in enumerate(completion.logprobs)]
        assert by == sorted(by)  # first those of the old weights, then those of the new ones
        assert max(abs(true[which][at] - completion.logprobs[at]) for at, which in enumerate(by)) < 1e-4


def test_a_folder_that_the_server_does_not_see_is_explained(
    server: VLLMServer, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WeightVersions.write

    def elsewhere(self: WeightVersions, *args: Any) -> WrittenWeights:
        found = written(self, *args)
        found.folder.rename(found.folder.with_name("not-shared"))
        return found

    monkeypatch.setattr(WeightVersions, "write", elsewhere)
    with pytest.raises(BackendError) as caught:
        build(MODEL, handle_of(load_reference(MODEL), 1), server, weights="folder")
    assert "cannot load weights 1" in caught.value.message
    assert "weights_folder" in str(caught.value.fix)


@pytest.mark.full
def test_a_run_whose_server_is_killed_and_replaced_goes_on_as_if_nothing_had_been(
    server: VLLMServer, tmp_path: Path
) -> None:
    scored = [0]

    def kill_in_the_second_step(prompt: str, response: str) -> float:
        scored[0] += 1
        if scored[0] == 40:  # of 32 in a step: the next rollout finds nobody, then a process with the weights on disk
            server.kill()
            threading.Thread(target=server.start_again).start()
        return digits(prompt, response)

    wanted = run(tmp_path / "undisturbed", MODEL, {"name": "server", "urls": [server.url]})
    found = run(tmp_path / "killed", MODEL, {"name": "server", "urls": [server.url]}, kill_in_the_second_step)
    assert seen(found) == seen(wanted)
    assert len({line["train/reward"] for line in found}) > 1
    state = json.loads((tmp_path / "killed" / "scratch" / "engines" / "state.json").read_text())
    assert state["servers"][0]["lost"] >= 1
    events = [json.loads(line) for line in (tmp_path / "killed" / "events.jsonl").read_text().splitlines()]
    [said] = [event["message"] for event in events if "servers get new weights" in event.get("message", "")]
    assert said.startswith("servers get new weights by folder: the run and its servers share one machine")
