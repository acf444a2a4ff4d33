"""Two real vLLM servers, one of which is killed while it works; and a flaw of vLLM that is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import BackendError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_agents.servers.roster import Roster
from nemorl_testing.models import load_reference, tiny_model
from server_runs import changed, handle_of, tokens
from vllm_server import PLAIN, VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.full]
UNTIED = tiny_model(tie_word_embeddings=False)
Pair = tuple[VLLMServer, VLLMServer]
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers of a model with an output head of its own. A start takes half a minute."""
    with ExitStack() as stack:
        logs = tmp_path_factory.mktemp("servers")
        servers = VLLMServer(UNTIED, logs / "0", options=PLAIN), VLLMServer(UNTIED, logs / "1", options=PLAIN)
        for server in servers:
            stack.callback(server.kill)
        for server in servers:
            server.wait()
        yield servers


def test_one_of_two_servers_is_killed_while_it_works_and_every_token_is_as_if_it_had_lived(
    pair: Pair, build: Build, tmp_path: Path
) -> None:
    engine = build(UNTIED, handle_of(load_reference(UNTIED), 1), *pair)
    sampling = SamplingParams(max_new_tokens=100)
    requests = [GenerationRequest((9, 18, 10 + number), sampling, tuple(range(8))) for number in range(32)]
    wanted = engine.generate(requests)
    killer = threading.Timer(0.3, pair[0].kill)  # 256 responses take seconds
    killer.start()
    found = engine.generate(requests)
    killer.join()
    assert tokens(found) == tokens(wanted)
    gaps = [
        abs(one - other)
        for group, same in zip(found, wanted, strict=True)
        for left, right in zip(group, same, strict=True)
        for one, other in zip(left.logprobs, right.logprobs, strict=True)
    ]
    assert max(gaps) < 1e-4  # another batch: other shapes, other rounding
    assert tokens(engine.generate(requests[:2])) == tokens(wanted[:2])  # the one that is left
    engine.shutdown()
    state = Roster(tmp_path / "scratch" / "engines").state()
    assert state is not None
    assert [server["lost"] for server in state["servers"]] == [1, 0]


def test_a_server_that_keeps_a_stale_output_head_is_refused(build: Build, tmp_path: Path) -> None:
    """vLLM 0.32 on the CPU, a model with tied embeddings, and no extension of ours."""
    model = tiny_model()
    server = VLLMServer(model, tmp_path / "log", options=PLAIN)
    try:
        server.wait()
        trained = load_reference(model)
        engine = build(model, handle_of(trained, 1), server)  # the weights that it was started with
        with pytest.raises(BackendError) as caught:
            engine.update_weights(handle_of(changed(trained), 2), 2)
    finally:
        server.kill()
    assert "probe tokens" in caught.value.message
    assert "tied embeddings" in str(caught.value.fix)
