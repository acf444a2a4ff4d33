"""A resolved config of NeMo RL, asked by dotted paths, with facts that follow from several of its keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

from nemorl_compat.features import MEDIA_DATASETS, MEDIA_PROCESSOR
from nemorl_compat.seeing import seeing_model
from nemorl_compat.systems import NEMO_RL, NEMORL, seems_from

FAMILIES = ("grpo", "ppo", "sft", "dpo", "rm", "distillation", "eval")
"""Sections that tell the algorithm."""
XTOKEN = "xtoken"
"""The family of distillation between tokenizers, which shares its section with distillation."""
_MIXTURES = re.compile(
    r"a\d+(\.\d+)?b|ba\d+|moe|mixtral|deepseek-v[23]|deepseek-r1$|gpt-oss|moonlight|kimi-k|llama-4|glm-4\.[5-9]|glm-5"
    r"|nemotron-(3|nano-3|super|ultra)|nemotron-h-3|nano-?v3|minimax|-a3b|super-120|ultra-",
    re.IGNORECASE,
)
"""Names of mixtures of experts."""


_BIASED = re.compile(
    r"deepseek-v3|deepseek-r1$|moonlight|kimi-k|glm-4\.[5-9]|glm-5|nemotron-(3|nano-3|super|ultra)|nemotron-h-3"
    r"|nano-?v3|minimax-m2|super-120|ultra-",
    re.IGNORECASE,
)
"""Names of mixtures whose routers have a bias for the choice of experts."""


class OldConfig:
    """The values of a config, by path.

    Args:
        data: Plain data: ``policy``, ``data``, ``cluster``, … and the algorithm's own section.
        folders: Where prompt files are looked for.
    """

    def __init__(self, data: Mapping[str, Any], folders: tuple[Path, ...] = ()) -> None:
        self.data, self.folders = data, folders

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path, or the fact of that name; ``default`` where there is none."""
        if path.startswith("facts."):
            return getattr(self, path.removeprefix("facts."))
        found: Any = self.data
        for key in path.split("."):
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return default
        return found

    def number(self, path: str, default: float) -> float:
        """The number at a path; ``default`` where there is none, or something else."""
        found = self.get(path, default)
        return found if isinstance(found, int | float) and not isinstance(found, bool) else default

    def whole(self, path: str, default: int, *, least: int | None = None) -> int:
        """The whole number at a path; ``default`` where there is none, a smaller one than ``least``, or something
        else."""
        found = self.number(path, default)
        return found if isinstance(found, int) and (least is None or found >= least) else default

    def texts(self, path: str) -> list[str]:
        """What the list at a path has, as texts; what is no list is its own only item."""
        found = self.get(path)
        return [str(item) for item in (found if isinstance(found, list) else [found])]

    def has(self, path: str) -> bool:
        missing = object()
        return self.get(path, missing) is not missing

    @cached_property
    def leaves(self) -> dict[str, Any]:
        """Every value by its path; an empty mapping is one, and each of several datasets has paths of its own."""
        return dict(_leaves(self.data))

    def changed(self, path: str, *value: Any) -> OldConfig:
        """This config with another value at a path, or without it."""
        return OldConfig(_changed(self.data, path.split("."), value), self.folders)

    @cached_property
    def family(self) -> str:
        """Which algorithm it is of.

        Raises:
            UsageError: there is no section of one.
        """
        found = next((name for name in FAMILIES if isinstance(self.data.get(name), Mapping)), None)
        if found == "distillation" and "teachers" in self.data:
            return XTOKEN
        if found is None:
            raise _no_section_error(self.data)
        return found

    @property
    def section(self) -> str:
        """The name of the algorithm's own section."""
        return "distillation" if self.family == XTOKEN else self.family

    def own(self, key: str, default: Any = None) -> Any:
        """A value of the algorithm's own section."""
        return self.get(f"{self.section}.{key}", default)

    def standing_for(self, part: str) -> OldConfig:
        """This config with another model (``teacher``, ``value``) in place of the policy."""
        return OldConfig({**self.data, "policy": self.data.get(part)}, self.folders)

    # Facts

    @property
    def mixture(self) -> bool:
        """The model is a mixture of experts, by its name or its layout."""
        sizes = ("policy.megatron_cfg.expert_model_parallel_size", "policy.dtensor_cfg.expert_parallel_size")
        return bool(_MIXTURES.search(str(self.get("policy.model_name", "")))) or any(
            isinstance(size := self.get(path), int) and size > 1 for path in sizes
        )

    @property
    def router_bias(self) -> bool:
        """The model's routers have a bias for the choice of experts, by its name."""
        return bool(_BIASED.search(str(self.get("policy.model_name", ""))))

    @property
    def responses(self) -> int | None:
        """Responses of a step, where both of its factors are whole numbers."""
        default = 1 if self.section == "distillation" else 16
        prompts = self.own("num_prompts_per_step", 128 if self.section == "distillation" else 32)
        samples = self.own("num_generations_per_prompt", default)
        return prompts * samples if isinstance(prompts, int) and isinstance(samples, int) else None

    @property
    def one_update(self) -> bool:
        """A step has one optimizer step."""
        size, responses = self.get("policy.train_global_batch_size"), self.responses
        return size is None or not isinstance(size, int) or responses is None or size >= responses

    @property
    def has_estimator(self) -> bool:
        return isinstance(self.get("grpo.adv_estimator"), Mapping)

    @property
    def has_penalties(self) -> bool:
        penalties = self.get("reward_penalties")
        return isinstance(penalties, Mapping) and any(
            value for key, value in penalties.items() if str(key).startswith("penalize_")
        )

    @property
    def fp8_rollouts(self) -> bool:
        return str(self.get("policy.generation.vllm_cfg.precision")) == "fp8"

    @property
    def samples_as_is(self) -> bool:
        """Responses are drawn from what the model says, without temperature and filters."""
        neutral = {"temperature": (1,), "top_p": (1, None), "top_k": (-1, None)}
        given = {name: self.get(f"policy.generation.{name}", values[0]) for name, values in neutral.items()}
        return all(given[name] in values for name, values in neutral.items())

    @property
    def asks_for_media(self) -> bool:
        """Images, sounds or videos are part of the prompts."""
        return (
            bool(self.media_kinds)
            or any(section.get("processor") == MEDIA_PROCESSOR for section in self._datasets)
            or bool(self.get("policy.is_vlm") and self.get("env.should_use_nemo_gym"))
            or isinstance(self.get("policy.tokenizer.video"), Mapping)
        )

    @property
    def media_kinds(self) -> frozenset[str]:
        """What its datasets show, as far as they are known: ``image``, ``audio``, ``video``."""
        names = {re.sub(r"[^a-z0-9]", "", str(section.get("dataset_name")).lower()) for section in self._datasets}
        return frozenset(kind for name in names for kind in MEDIA_DATASETS.get(name, ()))

    @property
    def processor_writes(self) -> bool:
        """The template of the model's processor writes conversations, which no setting of the tokenizer changes."""
        model = seeing_model(str(self.get("policy.model_name"))) if self.asks_for_media else None
        return self.asks_for_media and (model is None or model.has_own_template)

    @property
    def shows_films(self) -> bool:
        """Its datasets have films, or it is not known what else they show."""
        return "video" in self.media_kinds or (self.asks_for_media and not self.media_kinds)

    @property
    def _datasets(self) -> list[Mapping[str, Any]]:
        """The sections that describe datasets."""
        places = [self.get(f"data{part}") for part in ("", ".default", ".train", ".validation")]
        sections = [item for place in places for item in (place if isinstance(place, list) else [place])]
        return [section for section in sections if isinstance(section, Mapping)]

    @property
    def is_flat(self) -> bool:
        """Data is described as until January 2026: by one dataset, without sections of its own."""
        return isinstance(self.get("data"), Mapping) and not self.has("data.train")

    @property
    def environments(self) -> tuple[str, ...]:
        """Names of the environments that the data asks for; that of ``default`` is for datasets without one."""
        named = [self.get("data.env_name")]
        for part in ("train", "validation"):
            given = self.get(f"data.{part}")
            items = given if isinstance(given, list) else [given]
            usual = self.get("data.default.env_name")
            named += [item.get("env_name", usual) for item in items if isinstance(item, Mapping)]
        return tuple(dict.fromkeys(str(name) for name in named if name is not None))


_DATASETS = ("data.train", "data.validation")
"""Sections that may be lists, of datasets."""


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, list) and prefix in _DATASETS and node and all(isinstance(item, Mapping) for item in node):
        for number, item in enumerate(node):
            yield from _leaves(item, f"{prefix}.{number}")
    elif isinstance(node, Mapping) and (node or not prefix):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def without_number(key: str) -> str:
    """The path of a dataset's option, as it is where there is one dataset alone."""
    return _NUMBER.sub(r"\1.", key)


_NUMBER = re.compile(r"^(data\.(?:train|validation))\.\d+\.")


def _changed(node: Any, keys: list[str], value: tuple[Any, ...]) -> Any:
    """Plain data with the value of keys replaced, or taken out where none is given; nothing of it is shared."""
    key, *below = keys
    if isinstance(node, list):
        return [_changed(item, below, value) if str(at) == key else item for at, item in enumerate(node)]
    if below:
        return {**node, key: _changed(node[key], below, value)}
    return {**node, key: value[0]} if value else {name: item for name, item in node.items() if name != key}


COMMANDS = {"TRL": "trl", "verl": "verl", "OpenRLHF": "openrlhf"}
"""Systems that ``--from`` names."""


def _no_section_error(data: Mapping[str, Any]) -> UsageError:
    system = seems_from(data)
    if system == NEMORL:
        return UsageError("this is a config of nemorl already", fix="check it with `nemorl config validate`")
    if system not in (None, NEMO_RL):
        return UsageError(
            f"this is no config of NeMo RL: it seems to come from {system}",
            fix=f"say --from {COMMANDS[system]}"
            if system in COMMANDS
            else "give a config of NeMo RL; `nemorl config templates` lists configs to start from",
        )
    present = ", ".join(map(str, data)) or "nothing"
    guess = next((hint for key in data if (hint := did_you_mean(str(key), FAMILIES))), "")
    return UsageError(
        f"no section {', '.join(FAMILIES)} in this config: it has {present}",
        fix=guess or "give a whole config of NeMo RL, not a fragment that others take as their parent",
    )


def is_fragment(data: Mapping[str, Any]) -> bool:
    """Keys that only serve other configs: no section of an algorithm, and no sign of another system."""
    has_section = any(isinstance(data.get(name), Mapping) for name in FAMILIES)
    return not has_section and seems_from(data) in (None, NEMO_RL)
