"""Texts at and beyond the limits: what is read, and the one sentence that refuses the rest."""

from __future__ import annotations

import itertools
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from nemorl.base.packages.plugin_policy import read_policy
from nemorl.base.text.mappings import apply_overrides, read_source
from nemorl.base.text.reading import MAX_DEPTH, UnreadableError, parse_json, read_text
from nemorl.base.text.yaml_text import format_yaml, parse_yaml
from nemorl.config import Config, ModelName
from nemorl.config.load import load_config, validate
from nemorl.errors import ConfigError, DataError
from nemorl.storage.run_directory import to_yaml
from nemorl_rl.data.rows import rows_of
from pydantic import Field
from recorded_messages import Raises


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_merge_keys_take_over_what_they_do_not_override() -> None:
    text = "base: &base {lr: 1, eps: 2}\nrun: {<<: *base, eps: 3}\nboth: {<<: [{lr: 5}, *base], betas: 4}\n"
    data = parse_yaml(text)
    assert data["run"] == {"lr": 1, "eps": 3}
    assert data["both"] == {"lr": 5, "eps": 2, "betas": 4}  # the first of a list of mappings wins
    assert data["base"] == {"lr": 1, "eps": 2}


def test_an_override_through_an_alias_changes_one_place(tiny_model: Path) -> None:
    data = parse_yaml("one: &x {lr: 1}\ntwo: *x\n")
    assert apply_overrides(data, ["one.lr=2"]) == {"one": {"lr": 2}, "two": {"lr": 1}}


def test_yaml_words_mean_what_they_look_like() -> None:
    text = "a: yes\nb: 010\nc: 1:30\nd: 2024-99-99\ne: 1e-5\nf: 1_000\ng: 0x10\nh: ~\ni: True\nj: -.5\nk: .inf\n"
    expected = {"a": "yes", "b": "010", "c": "1:30", "d": "2024-99-99", "e": "1e-5", "f": 1000, "g": 16}
    assert parse_yaml(text) == expected | {"h": None, "i": True, "j": -0.5, "k": float("inf")}


# 9 lists of 9 of 9 …: 13 lines that stand for 9^13 = 2.5e12 values.
BOMB = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 14))
MERGE_BOMB = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 14)
)
REFUSED = {
    "deep": "a: " + nested(MAX_DEPTH + 1),
    "very deep": "[" * 900,
    "deep in blocks": "".join(f"{' ' * i}a:\n" for i in range(200)),
    "many values": "[" + "1," * 100_001 + "]",
    "alias bomb": BOMB,
    "merge bomb": MERGE_BOMB,
    "alias in itself": "a: &a [*a]",
    "long number": "a: " + "9" * 5000,
    "long hexadecimal number": "a: 0x" + "f" * 5000,
    "number as key": "1: 2",
    "true as key": "a:\n  true: 2",
    "nothing as key": "~: 2",
    "list as key": "? [a]\n: 2",
    "alias as key": "a: &x b\n*x : 2",
    "key twice": "a: 1\nb: 2\n'a': 3",
    "merge twice": "<<: {a: 1}\n<<: {b: 1}",
    "merge of a number": "<<: 3",
    "object": "a: !!python/object:os.system x",
    "wrong tag": "a: !!int x",
    "bytes": "a: !!binary x",
    "control character": "a: \x1b[31m",
    "undecodable": "a: \udcff",
    "half a pair": 'a: "\\ud800"',
    "two documents": "a: 1\n---\nb: 1",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_yaml_beyond_the_limits_is_refused_in_one_sentence(text: str, raises: Raises) -> None:
    with raises(UnreadableError) as refused:
        parse_yaml(text)
    assert len(str(refused.value)) < 200


def test_a_bomb_is_refused_before_it_takes_memory() -> None:
    tracemalloc.start()
    for text in (BOMB, MERGE_BOMB, "[" * 1_000_000):
        with pytest.raises(UnreadableError):
            parse_yaml(text)
    peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert peak_mib < 50


def test_nesting_up_to_the_limit_is_read() -> None:
    assert parse_yaml(nested(MAX_DEPTH)) == parse_json(nested(MAX_DEPTH)) != []


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": {"c": 1, "c": 1}}',
        nested(65),
        "[" * 1_000_000,
        '{"a": ' + "9" * 5000 + "}",
        '["\\ud800"]',
        b'{"a": "\xff"}',
        '{"a": 1',
        "",
    ],
)
def test_json_beyond_the_limits_is_refused_in_one_sentence(text: str | bytes, raises: Raises) -> None:
    with raises(UnreadableError):
        parse_json(text)


FILES: dict[str, bytes] = {
    "a comment of 20 MB": b"#" + b"x" * (20 << 20),
    "UTF-16": "algorithm: grpo\n".encode("utf-16"),
    "UTF-32": "algorithm: grpo\n".encode("utf-32"),
    "Latin-1": "a: 1\nb: é\n".encode("latin-1"),
    "a NUL byte": b"a: 1\nb: \0\n",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_that_is_no_config_text_is_refused(content: bytes, suffix: str, tmp_path: Path, raises: Raises) -> None:
    (path := tmp_path / f"c{suffix}").write_bytes(content)
    with raises(ConfigError, path=""):
        load_config(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (path := tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfalgorithm: grpo\n")
    assert read_source(path) == {"algorithm": "grpo"}


@pytest.mark.parametrize("suffix", ["yaml", "json", "jsonl", "csv"])
def test_pipes_and_folders_are_refused_and_never_opened(suffix: str, tmp_path: Path, raises: Raises) -> None:
    os.mkfifo(pipe := tmp_path / f"pipe.{suffix}")  # opening it would wait for ever
    (folder := tmp_path / f"folder.{suffix}").mkdir()
    for path, what in ((pipe, "pipe"), (folder, "folder")):
        with raises(UnreadableError, what):
            read_text(path)
        if suffix in ("yaml", "json"):
            with raises(ConfigError, what, path=""):
                load_config(path)
    if suffix in ("jsonl", "csv"):
        with raises((ConfigError, DataError)):
            rows_of({"name": "file", "path": str(pipe)}, "train")


def test_a_policy_file_that_cannot_be_read_admits_nobody(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "plugins: {allow: [a], allow: [b]}", BOMB):
        (path := tmp_path / "config.yaml").write_text(text)
        assert read_policy(path).allow == ()


ROWS = {
    "a key twice": b'{"prompt": "a", "prompt": "b"}',
    "too deep": b'{"prompt": ' + nested(2000).encode() + b"}",
    "a number of 5,000 digits": b'{"prompt": ' + b"9" * 5000 + b"}",
    "half a pair": b'{"prompt": "\\udead"}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "a NUL byte": b'{"prompt": "\0"}',
    "a row of 30 MB": b'{"prompt": "' + b"x" * (30 << 20) + b'"}',
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_bad_row_is_refused_with_its_line(row: bytes, tmp_path: Path, raises: Raises) -> None:
    (path := tmp_path / "t.jsonl").write_bytes(b'{"prompt": "1+1="}\n' + row + b"\n")
    with raises(DataError, "t.jsonl", 2) as refused:
        rows_of(str(path), "train")
    assert len(str(refused.value)) < 500


def test_a_mapping_that_holds_itself_is_refused(raises: Raises) -> None:
    data: dict[str, Any] = {"algorithm": "grpo"}
    data["policy"] = data
    with raises(ConfigError, path=""):
        load_config(data)


# Numbers, switches and paths


class Knobs(Config):
    """All kinds of scalars."""

    count: int = 1
    """A whole number."""
    seed: int = Field(0, ge=0, le=2**63 - 1)
    """A whole number with a limit of its own."""
    rate: float | None = None
    """A number or nothing."""
    pair: tuple[float, float] = (0.0, 1.0)
    """Numbers in a list."""
    on: bool = False
    """A switch."""
    folder: Path | None = None
    """A path."""
    model: str = ""
    """Text."""
    place: ModelName = ""
    """Text that may be a path."""


ACCEPTED = [
    ("count", 3, 3), ("count", 3.0, 3), ("count", "1e3", 1000), ("seed", 2**63 - 1, 2**63 - 1), ("rate", 1, 1.0),
    ("rate", "1e-5", 1e-5), ("rate", "-2.5E3", -2500.0), ("rate", None, None), ("pair", [0.9, "1e-1"], (0.9, 0.1)),
    ("on", True, True), ("model", "true", "true"), ("model", "1", "1"),
]  # fmt: skip
NOT_ACCEPTED = [
    ("count", True), ("count", "3"), ("count", 3.5), ("count", 10**9 + 1), ("count", 10**400), ("count", "1e400"),
    ("seed", 2**63), ("seed", 10**400), ("rate", True), ("rate", False), ("rate", "0.5"), ("rate", float("nan")),
    ("rate", float("inf")), ("rate", "1e999"), ("rate", 1e300), ("rate", 10**400), ("pair", [True, 0]),
    ("pair", [0, float("-inf")]), ("on", 1), ("on", 0), ("on", 1.0), ("on", "true"), ("on", "yes"), ("model", 1),
    ("model", True), ("model", "a\0b"), ("folder", "a\0b"), ("folder", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED, ids=str)
def test_a_value_of_its_kind_is_accepted(name: str, value: Any, expected: Any) -> None:
    assert getattr(validate(Knobs, {name: value}), name) == expected


@pytest.mark.parametrize(("name", "value"), NOT_ACCEPTED, ids=lambda value: str(value)[:20])
def test_a_value_of_another_kind_or_size_is_refused_at_its_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(Knobs, {name: value})
    (problem,) = refused.value.problems
    assert problem.path.split(".")[0] == name
    assert len(str(problem)) < 300


def test_home_directories_are_expanded_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    knobs = validate(Knobs, {"folder": "~/runs", "place": "~/models/m", "model": "~/kept"})
    assert (knobs.folder, knobs.place, knobs.model) == (Path("/home/ada/runs"), "/home/ada/models/m", "~/kept")
    assert validate(Knobs, {"folder": "~no_such_user/x"}).folder == Path("~no_such_user/x")


def test_a_resolved_config_keeps_words_that_yaml_1_1_would_change(tiny_model: Path, tmp_path: Path) -> None:
    revision = "12e4567"  # a commit, not 12e4567
    data = {
        "algorithm": "sft",
        "model": str(tiny_model),
        "data": {"name": "huggingface", "path": "org/name", "revision": revision, "train_split": "on"},
    }
    (path := tmp_path / "config.yaml").write_text(to_yaml(load_config(data)))
    again = load_config(path)
    assert again == load_config(data)
    assert (again.data.revision, again.data.train_split) == (revision, "on")  # type: ignore[union-attr]


def test_every_text_that_is_written_is_read_back_as_this_text() -> None:
    """Also by readers of YAML 1.1: PyYAML's own."""
    words = ["yes", "on", "~", "null", "12e4567", "0o17", "0x1F", "1:30", "2024-01-01", "<<", "=", "*a", "!x", "1_0.e1"]
    numbers = ["".join(word) for length in (1, 2, 3, 4) for word in itertools.product("1.eE+-_", repeat=length)]
    rng = random.Random(0)
    alphabet = "aB1 .,:;#-?!&*|>'\"%@`{}[]~\t\n\x07\x7f\x85\xa0\u2028\ufeff\u00e9\U0001f600"
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(30))) for _ in range(400)]
    data = {"list": words + numbers + texts, "keys": dict.fromkeys(words + numbers + texts, 1)}
    written = format_yaml(data)
    assert parse_yaml(written) == yaml.load(written, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) == data
    short = {"texts": [*words, *texts[:40]], "more": [1e-5, 3, True, None, float("inf")]}
    line = format_yaml(short, one_line=True)
    assert parse_yaml(line) == short
    assert format_yaml("a", one_line=True) == "a"


GRPO = {"algorithm": "grpo", "data": "arithmetic", "environment": "math"}


@pytest.mark.parametrize(
    ("change", "path", "fix"),
    [
        ({"checkpoint": {"metric": "accuracy"}}, "checkpoint.metric", "Did you mean 'validation/accuracy'?"),
        ({"checkpoint": {"metric": "validation/acuracy"}}, "checkpoint.metric", "Did you mean 'validation/accuracy'?"),
        ({"checkpoint": {"metric": "wins"}}, "checkpoint.metric", "names begin with train/"),
        (
            {"checkpoint": {"metric": "validation/reward"}, "validation": {"every": 0, "at_end": False}},
            "checkpoint.metric",
            "set validation.every",
        ),
        ({"plugins": {"prefer": {"environments.math": "acme"}}}, "plugins.prefer.environments.math", "nemorl-math-env"),
        (
            {"plugins": {"prefer": {"environments.maht": "acme"}}},
            "plugins.prefer.environments.maht",
            "environments.math",
        ),
        ({"plugins": {"prefer": {"math": "acme"}}}, "plugins.prefer.math", "environments.math"),
        ({"plugins": {"block": ["nemorl-*"]}}, "plugins.block.0", "the name that pip knows"),
        ({"plugins": {"allow": [""]}}, "plugins.allow.0", "the name that pip knows"),
        ({"cluster": {"workers_per_node": 10**6}}, "cluster.workers_per_node", "at most 1024"),
        ({"rollouts": {"environment_timeout_s": 1e9}}, "rollouts.environment_timeout_s", "from 0.001 to 1e+08"),
    ],
    ids=str,
)
def test_settings_that_can_do_nothing_are_refused(
    change: dict[str, Any], path: str, fix: str, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(GRPO | {"model": str(tiny_model)} | change)
    problems = {problem.path: problem.fix or "" for problem in refused.value.problems}
    assert list(problems) == [path]
    assert fix in problems[path]


@pytest.mark.parametrize("metric", ["train/reward", "validation/pass@8", "train/reward/format", "train/environment/x"])
def test_metrics_that_may_occur_rank_checkpoints(metric: str, tiny_model: Path) -> None:
    config = load_config(GRPO | {"model": str(tiny_model), "checkpoint": {"metric": metric}})
    assert config.checkpoint.metric == metric


def test_every_metric_that_the_documentation_names_may_rank_checkpoints() -> None:
    from nemorl.metrics import metric_problem
    from nemorl.plugins import registry

    kinds = ("algorithms", "training_backends", "generation_backends")
    plugins = [registry().load(kind, entry.id) for kind in kinds for entry in registry().index.of_kind(kind)]
    known = {name for plugin in plugins for name in plugin.metrics}
    documented = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    names = {name for name in documented.replace("`", " ").split() if name.startswith(("train/", "validation/"))}
    names = {name.strip(".,") for name in names if "<" not in name and not name.endswith(("/", "@k", "*"))}
    assert len(names) > 50
    refused = {name: metric_problem(name, known, validates=True, has_hooks=False) for name in names}
    assert not {name: why for name, why in refused.items() if why}
    bare = {name.partition("/")[2] for name in known} - {"train/total_step_time"}
    assert not [name for name in bare if f"`{name}`" not in documented and f"/{name}`" not in documented]


def test_a_wrong_file_in_json_says_where(tmp_path: Path, raises: Raises) -> None:
    (path := tmp_path / "c.json").write_text(json.dumps(GRPO)[:-1] + ', "algorithm": "sft"}')
    with raises(ConfigError, "algorithm", path=""):
        load_config(path)
