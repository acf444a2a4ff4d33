"""NeMo RL's ``env.nemo_gym`` and its HTTP server of the policy: each key has a place here, no effect, or a name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from nemorl_compat.conversions.gym import hydra_text
from nemorl_compat.features import GYM_MODELS, SECOND_MODEL
from nemorl_compat.migration import Migration, migrate
from whole_configs import put, whole

SERVER = "policy.generation.vllm_cfg"
CHAT = f"{SERVER}.http_server_serving_chat_kwargs"
THEIR_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
CODE = "resources_servers/code_gen/configs/code_gen.yaml"
PLAIN: dict[str, Any] = {
    "env.should_use_nemo_gym": True,
    "env.nemo_gym": {"config_paths": [THEIR_MODEL, CODE]},
    f"{SERVER}.expose_http_server": True,
    "data.train": {"data_path": "gym/train.jsonl"},
    "data.default": {"dataset_name": "NemoGymDataset", "env_name": "nemo_gym"},
}


def with_gym(base: str = "grpo", **changes: Any) -> Migration:
    config = whole(base)
    for path, value in deepcopy({**PLAIN, **changes}).items():
        put(config, path, value)
    return migrate(config)


def gym(path: str) -> str:
    return f"env.nemo_gym.{path}"


def policy_model(path: str) -> str:
    return gym(f"policy_model.responses_api_models.vllm_model.{path}")


def started(found: Migration) -> dict[str, Any]:
    assert found.is_complete, found.features
    start: dict[str, Any] = found.config["environment"]["start"]
    return start


@pytest.mark.parametrize("base", ["grpo", "ppo", "distillation"])
def test_what_nemo_rl_gives_to_gym_becomes_an_argument_of_its_command(base: str) -> None:
    settings = {
        gym("skip_venv_if_present"): True,
        gym("uv_venv_dir"): "$PERSISTENT_CACHE/venvs",
        gym("global_aiohttp_connector_limit"): 4096,
        gym("chemistry._inherit_from"): "litmus_agent",
        gym("judge.responses_api_models.openai_model.openai_model"): "judge",
        gym("code_gen.resources_servers.code_gen.sizes"): [1, 2.5, None],
    }
    assert started(with_gym(base, **settings))["overrides"] == [
        "++skip_venv_if_present=true",
        '++uv_venv_dir="${oc.env:PERSISTENT_CACHE}/venvs"',
        "++global_aiohttp_connector_limit=4096",
        '++chemistry._inherit_from="litmus_agent"',
        '++judge.responses_api_models.openai_model.openai_model="judge"',
        "++code_gen.resources_servers.code_gen.sizes=[1,2.5,null]",
    ]


def test_what_nemo_rl_sets_or_reads_itself_does_not_reach_gym() -> None:
    settings = {
        gym("policy_base_url"): "http://elsewhere/v1",
        gym("head_server"): {"host": "0.0.0.0", "port": 5000},
        gym("port_range_low"): 5000,
        gym("num_gpu_nodes"): 0,
        gym("use_absolute_ip"): True,
        gym("pad_dynamic_image_shapes"): True,
        gym("invalid_tool_call_patterns"): ["<x>"],
        gym("thinking_tags"): ["<a>", "</a>"],
        policy_model("num_workers"): 16,
        policy_model("sequential_reasoning_allowed"): False,
        policy_model("num_groups_nemo_rl"): 2,
    }
    found = with_gym(**settings)
    assert "overrides" not in started(found)
    assert found.config == with_gym().config
    assert [change.key for change in found.of("different") if change.key in settings] == [
        gym("use_absolute_ip"),
        gym("thinking_tags"),  # nothing is penalised
    ]


def test_texts_for_hydra_escape_quotes_and_the_backslashes_before_them_alone() -> None:
    assert hydra_text(r"\boxed{}") == r'"\boxed{}"'
    assert hydra_text('a\\"b') == r'"a\\\"b"'  # a backslash and a quote: each gets a backslash
    assert hydra_text("ends with \\") == r'"ends with \\"'
    assert hydra_text("$x$ costs $5, ü") == '"$x$ costs $5, ü"'  # no environment variables
    assert hydra_text({"a": ["b", {}]}) == '{a:["b",{}]}'


def test_the_chat_template_of_the_server_is_the_policys() -> None:
    found = with_gym(**{f"{CHAT}.chat_template": "{{ messages }}", f"{CHAT}.chat_template_content_format": "string"})
    assert found.is_complete, found.features
    assert found.config["policy"]["tokenizer"]["chat_template"] == "{{ messages }}"


def test_options_of_the_template_are_the_servers_below_those_of_requests() -> None:
    """A request has those of ``chat_template_kwargs``; only without any, those of ``extra_body``."""
    usual = {f"{CHAT}.default_chat_template_kwargs": {"a": 1, "b": 1}}
    asked = {policy_model("extra_body"): {"chat_template_kwargs": {"b": 2, "c": 2}}}
    own = {policy_model("chat_template_kwargs"): {"b": 3}}

    def options(**changes: Any) -> Any:
        found = with_gym(**changes)
        assert found.is_complete, found.features
        return found.config["policy"]["tokenizer"]["chat_template_kwargs"]

    assert options(**usual) == {"a": 1, "b": 1}
    assert options(**usual, **asked) == {"a": 1, "b": 2, "c": 2}
    assert options(**usual, **asked, **own) == {"a": 1, "b": 3}


def test_tags_go_to_the_penalties_that_look_for_them() -> None:
    changes: dict[str, Any] = {
        gym("invalid_tool_call_patterns"): ["<call>", "</call>", "<tool>", "</tool>"],
        gym("thinking_tags"): ["<r>", "</r>"],
        "grpo.invalid_tool_call_advantage": -5.0,
        "grpo.malformed_thinking_advantage": -2.0,
        "reward_penalties.penalize_empty_final_answer": True,
    }
    found = with_gym(**changes)
    assert found.is_complete, found.features
    assert found.config["message_penalties"] == {
        "invalid_tool_call_advantage": -5.0,
        "malformed_thinking_advantage": -2.0,
        "tool_call_tags": ["call", "tool"],
        "thinking_tags": ["<r>", "</r>"],
    }
    assert found.config["rollouts"]["reward_penalties"] == {
        "empty_final_answer": True,
        "thinking_tags": ["<r>", "</r>"],
    }


def test_effort_levels_are_a_reward_for_short_answers() -> None:
    found = with_gym(**{gym("effort_levels"): {"low_string": "{brief}", "low_weight": 0.1, "low_ub": 900}})
    assert found.is_complete, found.features
    assert found.config["low_effort"] == {"phrase": "{brief}", "weight": 0.1, "max_tokens": 900}


@pytest.mark.parametrize("effort", [{"low_string": "", "low_weight": 0.1}, {"low_string": "x", "low_weight": 0.0}, {}])
def test_effort_levels_that_are_off_change_nothing(effort: dict[str, Any]) -> None:
    assert with_gym(**{gym("effort_levels"): effort}).config == with_gym().config


def test_a_copy_of_the_policys_model_server_adds_its_own_options_to_each_request() -> None:
    options = {"num_workers": 4, "chat_template_kwargs": {"enable_thinking": False}}
    quick = {"_copy": "policy_model", "responses_api_models": {"vllm_model": options}}
    found = with_gym(**{gym("quick"): quick})
    place = "quick.responses_api_models.openai_model.extra_body.chat_template_kwargs"
    assert started(found)["overrides"] == ['++quick._copy="policy_model"', f"++{place}.enable_thinking=false"]
    assert "chat_template_kwargs" not in found.config["policy"].get("tokenizer", {})


def test_models_that_gym_serves_itself_have_nodes_beside_those_of_the_run() -> None:
    model = {"model": "org/judge", "vllm_serve_kwargs": {"tensor_parallel_size": 8}}
    judge = {gym("judge.responses_api_models.local_vllm_model"): model}
    start = started(with_gym(**judge, **{gym("num_gpu_nodes"): 2}))
    assert start["gpu_nodes"] == 2
    place = "judge.responses_api_models.local_vllm_model"
    assert start["overrides"] == [f'++{place}.model="org/judge"', f"++{place}.vllm_serve_kwargs.tensor_parallel_size=8"]


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({gym("judge.responses_api_models.local_vllm_model.model"): "judge"}, GYM_MODELS),
        (
            {gym("config_paths"): [THEIR_MODEL, "responses_api_models/genrm_model/configs/genrm_model.yaml"]},
            GYM_MODELS,
        ),
        ({gym("quick.responses_api_models.vllm_model.chat_template_kwargs.enable_thinking"): False}, SECOND_MODEL),
        ({gym("quick"): {"_copy": "policy_model", "responses_api_models": {"vllm_model": {"x": 1}}}}, SECOND_MODEL),
        ({policy_model("extra_body.bad_words"): ["<image>"]}, "words that are never generated"),
        ({policy_model("max_input_tokens"): 4096}, "max_input_tokens"),
        ({policy_model("audio_root"): "/sounds"}, "this setting of NeMo-Gym's model server"),
        ({gym("thinking_tags"): ["<r>"], "grpo.malformed_thinking_advantage": -5.0}, "think tags that are no pair"),
        (
            {gym("invalid_tool_call_patterns"): ["<call>", "call("], "grpo.invalid_tool_call_advantage": -5.0},
            "no pairs of tags",
        ),
        ({gym("pad_dynamic_image_shapes"): True, "policy.is_vlm": True}, "images and audio of NeMo-Gym"),
        ({"data.train": {"data_path": None}}, "a run without a dataset"),
        ({f"{CHAT}.chat_template_content_format": "openai"}, "chat_template_content_format"),
        ({f"{CHAT}.response_role": "robot"}, "an HTTP server of the policy"),
        ({"env.should_use_nemo_gym": False, "data.default": {"env_name": "math"}}, "an HTTP server of the policy"),
    ],
)
def test_what_is_missing_has_a_name_of_its_own(changes: dict[str, Any], feature: str) -> None:
    found = with_gym(**changes)
    assert any(feature in name for name in found.features), found.features


def test_parsers_of_the_server_are_a_difference_and_no_obstacle() -> None:
    parsers = {f"{CHAT}.reasoning_parser": "nano_v3", f"{SERVER}.reasoning_parser_plugin": "parsers/nano_v3.py"}
    found = with_gym(**parsers)
    assert found.is_complete, found.features
    assert {change.key for change in found.of("different")} >= parsers.keys()


def test_a_distillation_is_told_that_flagged_episodes_are_distilled_too() -> None:
    """Where NeMo RL leaves them out; an episode's teacher does not ask for its reward."""
    said = {change.key: change.outcome.text for change in with_gym("distillation").of("different")}
    assert "flags" in said[gym("config_paths")]
    assert "flags" not in {c.key: c.outcome.text for c in with_gym().of("different")}[gym("config_paths")]
    asked = with_gym("distillation", **{"env.should_mask_flagged_samples": True})
    assert "env.should_mask_flagged_samples" in [change.key for change in asked.of("different")]
