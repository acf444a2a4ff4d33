"""Every field of a body is honoured, ignored or refused by name, as the documentation's tables say."""

from __future__ import annotations

import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from nemorl_agents.gateway.apis.base import Api
from nemorl_agents.gateway.gateway import GatewayOptions
from nemorl_agents.gateway.server import APIS

ROOT = Path(__file__).parents[3]
ASKS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "?"}]},
    "/v1/responses": {"input": "?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "?"}]},
    "/v1/completions": {"prompt": "?"},
}
"""The least that each API needs, besides the model."""
REFUSED = [
    pytest.param(api, name, id=f"{api.path} {name}")
    for api in APIS
    for name, field in api.fields.items()
    if field.treatment == "refused"
]
IGNORED = [(api, name) for api in APIS for name, field in api.fields.items() if field.treatment == "ignored"]
NUMBERS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "n")


def body(api: Api, **fields: Any) -> dict[str, Any]:
    return {"model": "policy", **ASKS[api.path], **fields}


def message_of(answer: Any) -> str:
    text: str = answer.json()["error"]["message"]
    return text


@pytest.mark.parametrize(("api", "name"), REFUSED)
def test_a_refused_field_is_named_with_what_to_do_and_asks_nothing(talk: Any, api: Api, name: str) -> None:
    answer = talk.post(api.path, body(api, **{name: {"something": 1}}))
    assert answer.status_code == 400
    assert message_of(answer) == f"{name}: cannot be served: {api.fields[name].note}"
    assert answer.headers["x-should-retry"] == "false"
    assert talk.policy.asked == []
    for value in (*api.fields[name].neutral, None):
        assert talk.post(api.path, body(api, **{name: value})).status_code == 200


def test_ignored_fields_may_hold_anything(talk: Any) -> None:
    for api, name in IGNORED:
        assert talk.post(api.path, body(api, **{name: {"anything": [1]}})).status_code == 200, name


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_an_unknown_field_is_refused_and_guessed(talk: Any, api: Api) -> None:
    answer = talk.post(api.path, body(api, modell="x"))
    assert answer.status_code == 400
    assert message_of(answer) == "modell: unknown field: Did you mean 'model'?"
    assert "ignored_fields" in message_of(talk.post(api.path, body(api, zzzz=1)))


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_a_number_that_is_none_is_refused_with_its_bounds(talk: Any, api: Api) -> None:
    for name in NUMBERS:
        if name in api.fields:
            for value in ("much", True, -5.5, [1]):
                answer = talk.post(api.path, body(api, **{name: value}))
                assert answer.status_code == 400, (name, value)
                assert message_of(answer).startswith(f"{name}: must be a ")
    assert talk.policy.asked == []


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_what_an_api_cannot_do_without_is_asked_for(talk: Any, api: Api) -> None:
    for name in ("model", *ASKS[api.path]):
        answer = talk.post(api.path, {key: value for key, value in body(api).items() if key != name})
        assert answer.status_code == 400
        assert name in message_of(answer)


def test_fields_can_be_left_out_for_agents_that_insist(open_talk: Any) -> None:
    talk = open_talk(options=GatewayOptions(ignored_fields=("response_format", "enable_x")))
    asked = {"model": "policy", **ASKS["/v1/chat/completions"]}
    insisting = {**asked, "response_format": {"type": "json_object"}, "enable_x": 1}
    assert talk.post("/v1/chat/completions", insisting).status_code == 200
    assert talk.post("/v1/chat/completions", {**asked, "logit_bias": {"1": 2}}).status_code == 400


def test_sampling_fields_reach_the_policy(talk: Any) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "stop": "x", "max_tokens": 9, "max_completion_tokens": 7, "seed": 3}
    talk.post("/v1/chat/completions", {"model": "policy", **ASKS["/v1/chat/completions"], **asked, "top_k": 4})
    options = talk.policy.asked[0].options
    assert (options.temperature, options.top_p, options.top_k) == (0.5, 0.9, 4)
    assert (options.stop, options.max_new_tokens, options.seed) == (("x",), 7, 3)


def test_the_page_shows_the_tables_of_the_code() -> None:
    spec = spec_from_file_location("generate_gateway", ROOT / "docs" / "generate_gateway.py")
    assert spec is not None
    assert spec.loader is not None
    generator = module_from_spec(spec)
    sys.modules[spec.name] = generator
    spec.loader.exec_module(generator)
    page = (ROOT / "docs/agents/gateway.md").read_text()
    assert generator.filled_in(page) == page, "run python docs/generate_gateway.py"


@pytest.mark.parametrize(
    ("path", "client"),
    [
        ("/v1/chat/completions", "openai.types.chat.completion_create_params.CompletionCreateParamsBase"),
        ("/v1/responses", "openai.types.responses.response_create_params.ResponseCreateParamsBase"),
        ("/v1/completions", "openai.types.completion_create_params.CompletionCreateParamsBase"),
        ("/v1/messages", "anthropic.types.message_create_params.MessageCreateParamsBase"),
        ("/v1/messages/count_tokens", "anthropic.types.message_count_tokens_params.MessageCountTokensParams"),
    ],
)
def test_what_the_newest_clients_can_send_is_all_known(path: str, client: str) -> None:
    """The parameters of the SDKs themselves, from PyPI; what goes into headers is left out."""
    module, _, name = client.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    parameters = {*getattr(__import__(module, fromlist=[name]), name).__annotations__}
    (api,) = [api for api in APIS if api.path == path]
    assert parameters - {*api.fields} - {"user_profile_id", "workspace_id"} == set()


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_a_value_that_asks_for_nothing_passes_unlisted(talk: Any, api: Api) -> None:
    nothing: dict[str, Any] = {
        "xq": None,
        "xr": False,
        "xs": 0,
        "xt": "",
        "xu": [],
        "xv": {},
        "xw": "auto",
        "xx": "none",
        "xy": 0.0,
    }
    neutral = {"repetition_penalty": 1.0, "min_p": 0, "skip_special_tokens": True, "length_penalty": 1}
    assert talk.post(api.path, body(api, **nothing, **neutral)).status_code == 200
    for name, value in {"xq": True, "xs": 1, "xt": "on", "xu": [0], "xv": {"a": 0}, "repetition_penalty": 1.1}.items():
        answer = talk.post(api.path, body(api, **{name: value}))
        assert answer.status_code == 400, (name, value)
        assert "environment.gateway.ignored_fields" in message_of(answer)


def test_a_zero_under_a_misspelt_name_is_a_slip(talk: Any) -> None:
    answer = talk.post("/v1/chat/completions", body(APIS[0], temprature=0))
    assert message_of(answer) == "temprature: unknown field: Did you mean 'temperature'?"


def test_top_k_of_other_servers_that_keeps_all_is_left_out(talk: Any) -> None:
    for value in (-1, 0):
        assert talk.post("/v1/chat/completions", body(APIS[0], top_k=value)).status_code == 200
    assert [asked.options.top_k for asked in talk.policy.asked] == [None, None]


def test_an_ignored_field_is_noted_once(open_talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    log = logging.getLogger("nemorl_agents.gateway.server")
    monkeypatch.setattr(log, "warning", lambda text, *values: told.append(text % values))
    talk = open_talk(options=GatewayOptions(ignored_fields=("enable_x", "temperature")))
    for _ in range(3):
        assert talk.post("/v1/chat/completions", body(APIS[0], enable_x=1, temperature=0.5)).status_code == 200
    assert told == [f"agents send `{name}`, which is ignored as configured" for name in ("enable_x", "temperature")]
    assert {asked.options.temperature for asked in talk.policy.asked} == {None}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_variables_of_the_chat_template_reach_the_policy_in_one_way_of_writing(talk: Any, path: str) -> None:
    [api] = [api for api in APIS if api.path == path]
    for given, expected in (
        ({}, None),
        ({"b": False, "a": 1}, '{"a": 1, "b": false}'),
    ):
        assert talk.post(path, body(api, chat_template_kwargs=given)).status_code == 200
        assert talk.policy.asked[-1].options.template_options == expected
    for bad in ([1], {"messages": []}, {f"v{number}": 1 for number in range(9)}):
        answer = talk.post(path, body(api, chat_template_kwargs=bad))
        assert answer.status_code == 400
        assert "chat_template_kwargs" in message_of(answer)
