"""Datasets and environments: flat keys under ``data``, or ``train``, ``validation`` and ``default`` sections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml
from nemorl.config import Config
from nemorl.errors import DataError, NemorlError
from nemorl.plugins import registry
from pydantic import ValidationError

from nemorl_compat.conversions.gym import GYM_DATASET, GYM_NAME, gym_environment
from nemorl_compat.conversions.media import ENVIRONMENTS, leave_out_unused, media_environment
from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.conversions.prompts import template_of, text_of
from nemorl_compat.features import DATASETS, FILMS, GYM
from nemorl_compat.key_table import Outcome
from nemorl_compat.old_config import OldConfig

FILE_KINDS = ("ResponseDataset", "openai_format", "BinaryPreferenceDataset", "PreferenceDataset")
"""Names that stand for "the file given by a path"."""
COLUMNS = {
    "input_key": "prompt_column",
    "prompt_key": "prompt_column",
    "output_key": "response_column",
    "chat_key": "messages_column",
    "chosen_key": "chosen_column",
    "rejected_key": "rejected_column",
}
FILE_DEFAULTS = {
    "ResponseDataset": {"prompt_column": "input", "response_column": "output"},
    "BinaryPreferenceDataset": {"prompt_column": "prompt", "chosen_column": "chosen", "rejected_column": "rejected"},
    "openai_format": {"messages_column": "messages"},
}
TABLES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
"""Files that the dataset ``file`` reads."""
GRADED = ("grpo", "ppo", "distillation", "eval")
"""Families whose second column is the answer that is graded, not a response to imitate."""
SAMPLED = ("grpo", "ppo", "distillation")
"""Families whose episodes an environment may drive."""


NAMED = {"code_jaccard": "code_jaccard", "math_multi_reward": "multi_reward_math"}
"""Environments without settings of their own."""


@cache
def known_datasets() -> Mapping[str, Any]:
    """The content of ``keys/datasets.yaml``."""
    found: Mapping[str, Any] = yaml.safe_load((files("nemorl_compat") / "keys" / "datasets.yaml").read_text())
    return found


def data(old: OldConfig, new: Pieces) -> None:
    """The dataset to train on and the one to validate on."""
    if isinstance(old.get("data.train"), list) or isinstance(old.get("data.validation"), list):
        _several(old, new)
        return
    train = _Dataset(old, new, ("data.",) if old.is_flat else ("data.train.", "data.default."))
    made = train.made()
    if made is None:
        return
    if old.family == "eval":
        new.put("data", made)
        return
    if not _put_both(old, new, train, made):
        for name, nothing in {"every": 0, "at_start": False, "at_end": False}.items():
            new.put(f"validation.{name}", nothing)


def _several(old: OldConfig, new: Pieces) -> None:
    """Lists of datasets: to train on they are joined, to validate on each is one of its own."""
    train, held_out = _each(old, new, "train"), _each(old, new, "validation")
    if not train or held_out is None:
        return
    rows = old.get("data.num_prompts_per_dataloader") if old.get("data.use_multiple_dataloader") else None
    share = {} if rows is None else {"per_step": rows}
    parts = [{"data": made, **share} for made in train]
    new.put("data", train[0] if len(train) == 1 else {"name": "mixture", "parts": parts})
    if held_out:
        new.put("validation.data", {_set_name(made, number): made for number, made in enumerate(held_out, 1)})
        new.differ("data.validation", "each set has metrics of its own, beside those of all")


def _each(old: OldConfig, new: Pieces, part: str) -> list[dict[str, Any]] | None:
    """The datasets of a list, or of what stands in its place; ``None`` where one of them is not here."""
    given = old.get(f"data.{part}")
    places = (
        [f"data.{part}.{number}." for number in range(len(given))] if isinstance(given, list) else [f"data.{part}."]
    )
    described = [place for place in places if old.get(place.removesuffix("."))]
    made = [_Dataset(old, new, (place, "data.default.")).made() for place in described]
    return [found for found in made if found is not None] if None not in made else None


def _set_name(made: Mapping[str, Any], number: int) -> str:
    """A name for a set of rows to validate on, which its metrics have."""
    return f"{_plain(made.get('preset') or made.get('path')) or 'set'}_{number}"


def _put_both(old: OldConfig, new: Pieces, train: _Dataset, made: dict[str, Any]) -> bool:
    """The two datasets; whether there is one to validate on."""
    held_out = _held_out(old, new, train, made)
    if isinstance(held_out, str):
        made = {**made, "validation_path" if made["name"] == "file" else "validation_split": held_out}
    elif isinstance(held_out, dict):
        held_out.pop("validation_fraction", None)
        new.put("validation.data", held_out)
    if held_out is not None and made.get("validation_fraction") and not train.is_other:
        new.differ(train.key_of("split_validation_size"), "only the named dataset is validated on")
    if isinstance(held_out, str):
        made.pop("validation_fraction", None)
    new.put("data", made)
    return held_out is not None or bool(made.get("validation_fraction"))


def _held_out(old: OldConfig, new: Pieces, train: _Dataset, made: dict[str, Any]) -> dict[str, Any] | str | None:
    """A dataset, or what the training dataset calls its own part for validation."""
    if old.is_flat:
        file = old.get("data.val_data_path")
        if file is not None and made["name"] != "file":
            new.miss("data.val_data_path", "a file to validate on beside a dataset of the hub")
        own = train.known.get("own_of_split", {}).get(train.take("split"), train.known.get("own"))
        if file is not None or not isinstance(own, str):
            return str(file) if file is not None and made["name"] == "file" else made.get("validation_split")
        return own if own == "validation" else _Dataset(old, new, ("data.",), name=own).made()
    described = _Dataset(old, new, ("data.validation.", "data.default."))
    if not old.get("data.validation") or not (described.name or described.take("data_path")):
        return None
    if described.take("split_validation_size"):
        new.differ(described.key_of("split_validation_size"), "all rows of the set to validate on are validated on")
    other = described.made()
    if other is None or made["name"] == "file" or _but_split(other) != _but_split(made):
        return other
    split = other.get("split") or other.get("train_split")
    own = made.get("split") or made.get("train_split")
    return str(split) if split is not None and split != own else other


SPLIT = ("split", "train_split", "validation_split", "validation_fraction", "seed")
"""Which rows of a dataset are meant."""


def _but_split(dataset: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dataset.items() if key not in SPLIT}


class _Dataset:
    """One dataset, described at some places of the config of which the first that says something counts."""

    def __init__(self, old: OldConfig, new: Pieces, places: tuple[str, ...], name: str | None = None) -> None:
        self.old, self.new, self.places = old, new, places
        self.name = name or self.take("dataset_name")
        self.known: Mapping[str, Any] = known_datasets().get(_plain(self.name), {})
        self.is_other = name is not None
        """It came along with the one that the config names: the config's options are not its own"""

    def take(self, name: str) -> Any:
        return next((self.old.get(f"{place}{name}") for place in self.places if self.old.has(f"{place}{name}")), None)

    def key_of(self, name: str) -> str:
        """Where a value is given."""
        return next((f"{place}{name}" for place in self.places if self.old.has(f"{place}{name}")), "data")

    def made(self) -> dict[str, Any] | None:
        """The dataset of nemorl; ``None`` where there is none, which has been said."""
        name, path = self.name, self.take("data_path") or self.take("train_data_path")
        answer = "answer_column" if self.old.family in GRADED else "response_column"
        if name == GYM_DATASET and self.old.family in SAMPLED:
            if path is not None:
                return {"name": GYM_NAME, "path": str(path)}
            self.new.miss(self.key_of("dataset_name"), "a run without a dataset")
            return None
        if self.known.get("films"):
            self.new.miss(self.key_of("dataset_name"), FILMS)
        questions = self._questions(str(name)) if self.old.family == "eval" and self.take("problem_key") else None
        if questions is not None:
            found: dict[str, Any] = questions
        elif self.known and _has_preset(self.known["preset"]):
            preset = self.known.get("of_split", {}).get(str(self.take("split")), self.known["preset"])
            found = {"name": "preset", "preset": preset}
        elif "hub" in self.known:
            second = self.known.get("output") or self.known.get("answer")
            found = {"name": "huggingface", **self.known["hub"], answer: second}
        elif path is not None and (name is None or name in FILE_KINDS):
            found = self._file(str(name), str(path))
        elif name is not None and "/" in str(name):
            found = {"name": "huggingface", "path": name}
        else:
            feature = DATASETS.get(str(name)) or (f"the dataset {name}" if name else "a run without a dataset")
            self.new.miss(self.key_of("dataset_name"), feature)
            return None
        if not self.is_other:
            self._options(found)
        self._prompt(found)
        return found

    def _file(self, kind: str, path: str) -> dict[str, Any]:
        is_file = path.endswith(TABLES)
        columns = dict(FILE_DEFAULTS.get(kind, {}))
        if kind == "PreferenceDataset":
            self.new.miss(self.key_of("dataset_name"), "ranked preferences (PreferenceDataset)")
        if self.old.family in GRADED and "response_column" in columns:
            columns["answer_column"] = columns.pop("response_column")
        return {"name": "file" if is_file else "huggingface", "path": path, **columns}

    def _questions(self, place: str) -> dict[str, Any] | None:
        """A file of questions to evaluate on; ``None`` where the place is none. Files of the web are not downloaded."""
        path = urlsplit(place).path if "://" in place else place
        if not path.endswith(TABLES):
            return None
        if "://" in place:
            path = PurePosixPath(path).name
            self.new.differ(self.key_of("dataset_name"), f"download the file yourself, as {path}")
        columns = {"prompt_column": self.take("problem_key"), "answer_column": self.take("solution_key")}
        return {"name": "file", "path": path, "validation_path": path, **columns}

    def _options(self, found: dict[str, Any]) -> None:
        is_preset = found["name"] == "preset"
        if found["name"] != "file":
            role = "validation_split" if self.old.family == "eval" else "split" if is_preset else "train_split"
            given = {
                "validation_split": self.take("val_split"),
                role: self.take("split") or self.take("train_split"),
                "subset" if is_preset else "config_name": self.take("subset"),
            }
            found |= {key: value for key, value in given.items() if value is not None}
        if str(self.take("split")) in self.known.get("of_split", {}):
            found["split"] = "train"  # each is a dataset of one split
        self._media_folder(found)
        self._held_out_share(found)
        rows = self.take("max_samples")
        if rows is not None:
            found["max_rows"] = rows
            self.new.differ(self.key_of("max_samples"), "the first rows of each split are read, and not any of them")
        columns = {}
        for old, new in COLUMNS.items():
            value = self.take(old)
            if value is not None:
                columns["answer_column" if old == "output_key" and self.old.family in GRADED else new] = value
        if not is_preset:
            found |= columns
            return
        if "output" in self.known and self.take("output_key") is None:
            columns["answer_column" if self.old.family in GRADED else "response_column"] = self.known["output"]
        if self.old.family == "eval" and "evaluated" in self.known:
            found["columns"] = self.known["evaluated"]
        if columns:
            found["columns"] = {column.removesuffix("_column"): value for column, value in columns.items()}

    def _media_folder(self, found: dict[str, Any]) -> None:
        """The place of files that rows name. NeMo RL downloads and unpacks them itself."""
        if self.known.get("media") == "files":
            folder = self.take("download_dir")
            found["media_folder"] = folder or f"media/{_plain(self.name)}"
            self.new.differ(
                self.key_of("dataset_name"), f"get the files of its rows yourself, into {found['media_folder']}"
            )

    def _held_out_share(self, found: dict[str, Any]) -> None:
        size = self.take("split_validation_size")
        if size is None and self.old.is_flat and isinstance(self.known.get("own"), float):
            size = self.known["own"]
        for name in ("split_validation_size", "seed"):
            if self.known and not self.known.get("splits"):
                self.new.findings.setdefault(self.key_of(name), Outcome("neutral", "unread"))
        if self.known and not self.known.get("splits"):
            return
        if isinstance(size, float) and 0 <= size < 1:
            found["validation_fraction"] = size
            seed = self.take("seed")
            found |= {"seed": seed} if seed is not None else {}
        elif size:
            self.new.miss(self.key_of("split_validation_size"), "a number of held-out rows (a share is possible)")

    def _prompt(self, found: dict[str, Any]) -> None:
        """Templates out of their files; text as a message of the user, as it was."""
        if self.old.family in GRADED:
            found["chat"] = True
        if self.known.get("bare"):  # the preset's own words ask for tags; here the config's prompt file does
            found["prompt_template"] = "{prompt}"
        for name in ("prompt_file", "system_prompt_file"):
            file = self.take(name)
            if file is None:
                continue
            text = text_of(self.old.folders, str(file))
            if text is None:
                self.new.miss(self.key_of(name), f"the prompt file {file}, which is not there")
            elif name == "system_prompt_file":
                found["system_prompt"] = text
            elif self._is_conversation(found):
                self.new.miss(self.key_of(name), "a prompt template for conversations")
            else:
                self._put_template(found, text, str(file))

    def _is_conversation(self, found: Mapping[str, Any]) -> bool:
        return "messages_column" in found or "chosen_column" in found or self.old.family in ("dpo", "rm")

    def _put_template(self, found: dict[str, Any], text: str, file: str) -> None:
        asks_options = str(self.old.get("env.math.verifier_type")).endswith("multichoice")
        if asks_options and "{" not in text:
            found["prompt_template"] = f"{text}\n\nQuestion: {{question}}\nOptions:\n{{options}}"
            return
        try:
            column = "prompt" if found["name"] == "preset" else found.pop("prompt_column", "prompt")
            found["prompt_template"] = template_of(text, column, file)
        except DataError as error:
            self.new.miss(self.key_of("prompt_file"), error.message)


@cache
def _has_preset(name: str) -> bool:
    """A preset of this name is installed."""
    try:
        preset: type[Config] = registry().load("datasets", "preset")
        preset.model_validate({"preset": name, "media_folder": "."})
    except (NemorlError, ValidationError):
        return False
    return True


def _plain(name: Any) -> str:
    return "".join(letter for letter in str(name or "").lower() if letter.isalnum())


def environment(old: OldConfig, new: Pieces) -> None:
    """The one environment that the data names."""
    if old.family not in GRADED:
        return
    name, *others = old.environments or ("math",)
    for key, value in old.leaves.items() if others else ():
        if key.endswith(".env_name") and str(value) in others:
            new.miss(key, f"several environments in one run ({value} beside {name})")
    settings, is_gym = old.get(f"env.{name}"), name == GYM_NAME
    leave_out_unused(old, new, name)
    if is_gym != bool(old.get("env.should_use_nemo_gym")) or (is_gym and old.family not in SAMPLED):
        new.miss("env.should_use_nemo_gym", GYM)
        new.miss("data.default.env_name", GYM)
    if name == "math" and str(old.get("env.math.verifier_type")).endswith("multichoice"):
        new.put("environment", "multiple_choice")
    elif name == "math" and old.get("env.math.math_verify_impl") == "dapo_math_verify":
        new.put("environment", "dapo_math")
    elif name in NAMED:
        new.put("environment", NAMED[name])
    elif name in ENVIRONMENTS:
        media_environment(old, new, name)
    elif is_gym and old.family in SAMPLED:
        gym_environment(old, new)
    elif name in ("math", "math_default"):
        workers = settings.get("num_workers") if isinstance(settings, Mapping) else None
        new.put("environment", {"name": "math", **({} if workers is None else {"workers": workers})})
    elif name == "reward_model":
        model = old.get("env.reward_model.model_name")
        dtype = old.get("env.reward_model.precision")
        precision = {"dtype": dtype} if dtype in ("float32", "bfloat16") else {}
        new.put("environment", {"name": "reward_model", "model": model, **precision})
