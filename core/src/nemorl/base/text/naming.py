"""Kinds of things that the texts and paths of a config name: a field declares its kind once, as its type.

    model: ModelName
    urls: tuple[ServerURL, ...] = ()
    api_key_env: SecretVariable = "OPENAI_API_KEY"

Who has to know asks for the values by kind and never looks at the names of fields: the site's policy, the checks before
a start, the search for secrets. ``~`` is the home directory in what may be a path. A :class:`~pathlib.Path` that
declares nothing is a file. Of options that nobody declared (those that are handed on to an engine, and of plugins that
do not say) :func:`kind_by_name` guesses, so that leaving the declaration out opens no gap.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

Kind = Literal[
    "model", "served_model", "dataset", "file", "server", "command", "interpreter", "code", "secret", "variables",
    "options", "text",
]  # fmt: skip
PATHS: tuple[Kind, ...] = ("model", "dataset", "file")
"""Kinds whose texts may be paths."""
WHOLE: tuple[Kind, ...] = ("command", "variables")
"""Kinds whose value is not split into its texts."""


@dataclass(frozen=True)
class Names:
    """A mark in the type of a field: what its texts name. The types below are made of it.

    Example:
        >>> class Sampler(Config):
        ...     draft: Annotated[str, Names("model")] = "org/draft"
        >>> [named.kind for named in Sampler().named_values()]
        ['model']
    """

    kind: Kind


ModelName = Annotated[str, Names("model")]
"""Hugging Face name or local folder of a model or a tokenizer that nemorl loads.

Example:
    >>> model: ModelName = "Qwen/Qwen3-0.6B"
"""
ServedModel = Annotated[str, Names("served_model")]
"""A model by the name that a server has for it.

Example:
    >>> judge: ServedModel = "judge-70b"
"""
DatasetName = Annotated[str, Names("dataset")]
"""A dataset: name on the hub, file or folder.

Example:
    >>> corpus: DatasetName = "wikipedia"
"""
DatasetFile = Annotated[Path, Names("dataset")]
"""A file or folder of a dataset.

Example:
    >>> rows: DatasetFile = Path("rows.jsonl")
"""
FileName = Annotated[str, Names("file")]
"""A text that may be the path of a file.

Example:
    >>> template: FileName = "chat.jinja"
"""
ServerURL = Annotated[str, Names("server")]
"""Address of a server: a URL, ``host`` or ``host:port``.

Example:
    >>> url: ServerURL = "https://node7:8000"
"""
Command = Annotated[tuple[str, ...], Names("command")]
"""A program with its arguments.

Example:
    >>> command: Command = ("python", "agent.py")
"""
Interpreter = Annotated[Path, Names("interpreter")]
"""A Python of another environment, with the packages that are installed there.

Example:
    >>> python: Interpreter = Path("/opt/venv/bin/python")
"""
CodeName = Annotated[str, Names("code")]
"""Code by its name: ``file.py:function``, a module, a shell script.

Example:
    >>> reward: CodeName = "rewards.py:correct"
"""
SecretVariable = Annotated[str, Names("secret")]
"""Name of the environment variable that holds a secret.

Example:
    >>> api_key_env: SecretVariable = "OPENAI_API_KEY"
"""
Variables = Annotated[dict[str, str], Names("variables")]
"""Environment variables of a process, with their values.

Example:
    >>> env: Variables = {"NCCL_DEBUG": "WARN"}
"""
Options = Annotated[dict[str, Any], Names("options")]
"""Options that are handed on to other software: what each names is guessed from its key.

Example:
    >>> engine_args: Options = {"tokenizer": "org/model"}
"""
PlainText = Annotated[str, Names("text")]
"""A text that names nothing, whatever its field is called.

Example:
    >>> model_column: PlainText = "which"
"""


class Named(NamedTuple):
    """Something that a config names."""

    path: str
    """Of the option, e.g. ``policy.tokenizer.name``."""
    kind: Kind
    value: Any
    """A text; a tuple of texts of a command; a mapping of variables."""
    is_guess: bool = False
    """Nobody declared it: the name of its key sounds so."""


class Naming(ABC):
    """A value whose parts say themselves what they name: a config."""

    @abstractmethod
    def named_values(self, path: str = "") -> Iterator[Named]:
        """All that it names.

        Args:
            path: Of this value, in the config that it is part of.
        """


_OF_HUB = r"(?:_(?:name|path|id|dir|repo|name_or_path|id_or_path))?"
_WORDS: tuple[tuple[Kind, str], ...] = (
    ("text", r"column|field|tag|label|config_name|server_name|tool_parser|file_type"),
    ("secret", r"(?:api_?key|token|password|secret|credential)_env|secret"),
    ("variables", r"env|env_vars|environ|environment|environment_variable|variable"),
    ("server", r"ur[il]|base_url|endpoint|address|addresse|host|hostname|server|api_base|tracking_uri"),
    ("dataset", rf"(?:dataset|corpus|data_set){_OF_HUB}|corpora|(?:data|train|val|eval|test)_(?:path|dir|file)"
                r"|parquet"),
    ("model", rf"(?:model|tokenizer|adapter|checkpoint|ckpt|lora|peft|teacher){_OF_HUB}|lora_module|(?:hf_|hub_)?repo"
              r"|repo_id"),
    ("interpreter", r"python|interpreter|py_executable"),
    ("command", r"command|cmd|executable|program|argv"),
    ("code", r"function|script|cls|callable|hook|module_path|class_path|py_module|plugin|plugin_path|logits_processor"
             r"|middleware|setup|entry_?point|rollout|auto_map|target_"),
    ("file", r"path|file|filename|folder|dir|directory|directorie|chat_template|cache|certificate|ca|keyfile|cert"
             r"|generation_config"),
)  # fmt: skip
_GUESSES = [(kind, re.compile(rf"(?:^|[_.])(?:{words})s?$", re.IGNORECASE)) for kind, words in _WORDS]


def kind_by_name(name: str) -> Kind | None:
    """The kind of thing that an option of this name usually names.

    >>> kind_by_name("reward_model"), kind_by_name("base_url"), kind_by_name("model_column"), kind_by_name("lr")
    ('model', 'server', 'text', None)
    """
    return next((kind for kind, words in _GUESSES if words.search(name)), None)


def declared_kind(annotation: Any, metadata: list[Any]) -> Kind | None:
    """The kind that a field declares for its texts; a path that declares nothing is a file."""
    marks = [*metadata, *_parts(annotation)]
    kind = next((mark.kind for mark in marks if isinstance(mark, Names)), None)
    return kind or ("file" if Path in marks else None)


def takes_text(annotation: Any) -> bool:
    """A field's values are, or hold, texts or paths of any content; keys of a mapping apart."""
    if get_origin(annotation) in (dict, Mapping):
        return takes_text(get_args(annotation)[1])
    inner = get_args(annotation)
    return annotation in (str, Path, Any) or any(takes_text(part) for part in inner if not isinstance(part, str))


def _parts(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of, marks among them."""
    yield annotation
    for part in getattr(annotation, "__metadata__", ()):
        yield part
    if getattr(annotation, "__metadata__", None):
        yield from _parts(annotation.__origin__)
        return
    for part in get_args(annotation):
        yield from _parts(part)


def texts_of(value: Any, path: str, kind: Kind | None, *, is_guess: bool = False) -> Iterator[Named]:
    """All that values name: a text by what is declared or by the name of its key, a config as it says itself.

    Args:
        value: A text, path, config, sequence or mapping; anything else names nothing.
        path: Of the option.
        kind: What it names; ``None``: nobody said.
        is_guess: By its name alone.
    """
    if isinstance(value, Naming):
        yield from value.named_values(path)
        return
    if kind == "text" or value in (None, "", (), {}):
        return
    kind = None if kind == "options" else kind
    is_guess = is_guess or kind is None
    if kind in WHOLE and isinstance(value, list | tuple | Mapping):
        yield Named(path, kind, value, is_guess)
    elif isinstance(value, str | PurePath):
        found = kind or ("server" if isinstance(value, str) and is_url(value) else None)
        if found is not None:
            yield Named(path, found, (value,) if found == "command" else str(value), is_guess)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(item, f"{path}.{key}", kind or kind_by_name(str(key)), is_guess=is_guess)
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(value):
            yield from texts_of(item, f"{path}.{number}", kind, is_guess=is_guess)


_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]\S*", re.IGNORECASE)


def is_url(text: str) -> bool:
    """A text is the address of a server and nothing else.

    >>> is_url("https://[::1]:8000/v1"), is_url("see https://example.org")
    (True, False)
    """
    return _URL.fullmatch(text) is not None
