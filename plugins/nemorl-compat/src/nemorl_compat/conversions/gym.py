"""NeMo-Gym: the servers to start, the rows that they play, and how the policy's model server writes prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.features import GYM_MODELS, SECOND_MODEL
from nemorl_compat.key_table import judge
from nemorl_compat.old_config import OldConfig

GYM_NAME, GYM_DATASET = "nemo_gym", "NemoGymDataset"
SECTION, OVERRIDES = "env.nemo_gym.", "environment.start.overrides"
THEIR_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
OUR_MODEL = "responses_api_models/openai_model/configs/openai_model.yaml"
"""Gym's model server for NeMo RL asks the engine for token ids; nemorl has them, and needs one that forwards."""
MODEL_SERVER = f"{SECTION}policy_model.responses_api_models.vllm_model"
SERVED_BY_GYM = re.compile(r"responses_api_models/(local_vllm_model|genrm_model)/")
SERVED_HERE = re.compile(r"\.responses_api_models\.(local_vllm_model|genrm_model)\.")
SECOND_SERVER = re.compile(r"env\.nemo_gym\.([^.]+)\.responses_api_models\.vllm_model\.")
OPTIONS_OF_REQUESTS = (".vllm_model.chat_template_kwargs.", ".openai_model.extra_body.chat_template_kwargs.")
"""Where each of the two model servers has what it adds to its requests."""
HTTP_SERVER = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
_VARIABLE = re.compile(r"\$([A-Z][A-Z0-9_]{2,})")
"""An environment variable that was not set where the old config was read."""


def gym_environment(old: OldConfig, new: Pieces) -> None:
    """The environment, with the servers of the config."""
    paths = old.get("env.nemo_gym.config_paths")
    if not isinstance(paths, list) or THEIR_MODEL not in paths:
        new.miss("env.nemo_gym.config_paths", f"NeMo-Gym without {THEIR_MODEL}")
        return
    nodes = old.whole("env.nemo_gym.num_gpu_nodes", 0)
    served = [key for key in old.leaves if key.startswith(SECTION) and SERVED_HERE.search(key)]
    if not nodes and (served or any(SERVED_BY_GYM.match(str(path)) for path in paths)):
        new.miss("env.nemo_gym.config_paths", GYM_MODELS)
    for key in [key for key in old.leaves if (found := SECOND_SERVER.match(key)) and not _is_copy(old, found[1])]:
        new.miss(key, SECOND_MODEL)
    start: dict[str, Any] = {"config_paths": [OUR_MODEL if path == THEIR_MODEL else path for path in paths]}
    overrides = list(_overrides(old))
    if overrides:
        start["overrides"] = overrides
    if nodes:
        start["gpu_nodes"] = nodes
    new.put("environment", {"name": GYM_NAME, "start": start})
    place = "Gym is started where nemorl is, by `ng_run` (environment.start)"
    flagged = "; episodes that it flags are distilled like all others" if old.family == "distillation" else ""
    new.differ("env.nemo_gym.config_paths", place + flagged)


def _overrides(old: OldConfig) -> Iterator[str]:
    """Gym's own settings, as arguments of its command."""
    for key, value in old.leaves.items():
        if key.startswith(SECTION) and judge(old, key, value).to == OVERRIDES:
            name = key.removeprefix(SECTION).replace(*OPTIONS_OF_REQUESTS)
            yield f"++{name}={hydra_text(value)}"


def _is_copy(old: OldConfig, server: str) -> bool:
    """A model server is the policy's but for what it adds to requests."""
    return server == "policy_model" or old.get(f"{SECTION}{server}._copy") == "policy_model"


def hydra_text(value: Any) -> str:
    r"""A value in the grammar of Hydra's command line, which is not JSON's: texts have no escapes but of the quote.

    Environment variables of the old config are read where Gym starts.

    >>> print(hydra_text(["a\n", {"size": 1.5}, True, None, "$HOME/x", 'say "no"']))
    ["a
    ",{size:1.5},true,null,"${oc.env:HOME}/x","say \"no\""]
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    if isinstance(value, int | float):
        return str(value)
    text = _VARIABLE.sub(r"${oc.env:\1}", str(value))
    text = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), text)
    return f'"{text}"'


def chat_template(old: OldConfig) -> str | None:
    """The chat template of the server that Gym's agents call, where it has another than the tokenizer."""
    found = old.get(f"{HTTP_SERVER}.chat_template") if GYM_NAME in old.environments else None
    return found if isinstance(found, str) else None


def template_options(old: OldConfig) -> dict[str, Any]:
    """Options of the chat template for Gym's agents: what the server takes by itself, below what requests say.

    A request says ``chat_template_kwargs`` of Gym's model server, or else those of its ``extra_body``.
    """
    if GYM_NAME not in old.environments:
        return {}
    places = ("default_chat_template_kwargs", "chat_template_kwargs")
    usual = [old.get(f"{HTTP_SERVER}.{name}") for name in places]
    said = [old.get(f"{MODEL_SERVER}.{name}") for name in ("chat_template_kwargs", "extra_body.chat_template_kwargs")]
    return {**_first(usual), **_first(said)}


def _first(options: list[Any]) -> Mapping[str, Any]:
    """The first that says something."""
    return next((given for given in options if isinstance(given, Mapping) and given), {})
