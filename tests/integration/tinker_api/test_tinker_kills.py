"""Killed at each call of the models, before and after it: what clients see is what they see of a server that lives."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from nemorl.resources.ports import free_port
from raw_client import RawClient, pass_bytes, step_body
from tiers import only
from toy_server import Keeper


def story(client: RawClient) -> list[Any]:
    """All kinds of requests, with passes that add up and some that are sent before their turn."""
    session = client.session()
    model = client.model(session)
    found: list[Any] = []

    def passes(seq: int, *token_ids: int, forward_only: bool = False) -> str:
        body = pass_bytes(model, seq, token_ids, forward_only=forward_only)
        return str(client.asked("/forward_backward", body)["request_id"])

    def steps(seq: int) -> str:
        return str(client.asked("/optim_step", step_body(model, seq))["request_id"])

    early = [steps(3), passes(2, 4, 5, 6), passes(1, 1, 2, 3)]
    found += [client.fetched(request_id) for request_id in early]
    found += [client.fetched(passes(4, 7, 8, 9)), client.fetched(passes(5, 1, 2, forward_only=True))]
    saved = {"model_id": model, "seq_id": 6, "path": "middle"}
    found.append(client.result("/save_weights", saved).replace(session.encode(), b"SESSION"))
    found += [client.fetched(passes(7, 2, 3, 4)), client.fetched(steps(8))]
    sampler = {"model_id": model, "seq_id": 9, "sampling_session_seq_id": 0}
    sampler_id = json.loads(client.result("/save_weights_for_sampler", sampler))["sampling_session_id"]
    params = {"max_tokens": 8, "seed": 5, "stop": []}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    asked = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": prompt,
        "sampling_params": params,
    }
    found.append(client.result("/asample", asked))
    loaded = {"session_id": session, "model_seq_id": 1, "path": f"tinker://{model}/weights/middle", "optimizer": True}
    second = json.loads(client.result("/load_weights", loaded))["model_id"]
    for seq, tokens in enumerate(([1, 2, 3], [3, 4, 5]), 1):
        found.append(client.result("/forward_backward", pass_bytes(second, 2 * seq - 1, tokens)))
        found.append(client.result("/optim_step", step_body(second, 2 * seq)))
    found.append(client.fetched(steps(10)))
    found.append(client.fetched(passes(11, 1, 2, 3, 4, 5, forward_only=True)))
    return found


@pytest.fixture(scope="module")
def alone(keeper: Keeper, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("alone")
    return story(RawClient(keeper.begin(folder, free_port())))


@pytest.mark.slow
@pytest.mark.parametrize("replay_s", [0.0, 1000.0], ids=["state-each-step", "replay-of-all"])
@pytest.mark.parametrize("when", only("dies_after", of=("dies_before", "dies_after")))
def test_a_kill_at_any_call_changes_no_answer(
    keeper: Keeper, tmp_path: Path, alone: list[Any], when: str, replay_s: float
) -> None:
    deaths: list[int] = []
    for call in count(1):

        def revive(number: int = call) -> None:
            deaths.append(number)
            keeper.again()

        address = keeper.begin(tmp_path / str(call), free_port(), models={when: call}, replay_s=replay_s)
        assert story(RawClient(address, revive=revive)) == alone, f"{when} {call}"
        if call not in deaths:  # the story has no more calls
            break
    assert len(set(deaths)) >= 18
