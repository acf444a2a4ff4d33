"""A thousand seeded inputs that no person would write: configs, overrides and rows are read, or refused in one message.

Claim: whatever the text, loading ends with a config or rows (exit code 0) or with one ``NemorlError`` (exit code 2);
no other exception, no wait without end, no memory without bound.
"""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from nemorl.config.explain import field_paths
from nemorl.config.load import load_config
from nemorl.errors import NemorlError
from nemorl.plugins.registry import registry
from nemorl_rl.data.rows import rows_of

pytestmark = pytest.mark.slow
INPUTS = 1000
SECONDS_EACH = 20
"""One input that takes longer hangs; the slowest takes a fraction of one second."""
MEBIBYTES = 500
"""What all of them together may add to the peak memory of the process."""

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)
COMMENT = "# A config that works until it is changed; what is put into this line does nothing.\n" * 3
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1e-5, 0.5, 10**9, 10**18, -(10**30), 10**400, float("inf"), float("-inf"),
    float("nan"), "", " ", "1", "true", "yes", "1e-5", "~", "~/x", "~nobody_here/x", "..", "/dev/null", "/dev/zero",
    "a\0b", "\ud800", "\u202egnp", "\x1b[31mred", "[bold]", "x" * 10_000, "9" * 5000, "grpo", "dtensor", "math",
    "file", "arithmetic", "no:such", [], [[]], ["a"], [None], [1, "a"], {}, {"name": None}, {"name": "math"},
    {"name": "file"}, {"name": "x", "y": {}}, {"": 1}, {"a.b": 1}, {"\ud800": 1}, [{"name": "tensorboard", "z": 1}],
    {"name": "weighted", "parts": {"a": {"b": 1}}},
]  # fmt: skip
SNIPPETS = [
    "{", "}", "[", "]", ":", ": ", "\n", "\n  ", "\t", "- ", "? ", "&a ", "*a", "<<: *a\n", "<<: 3\n",
    "!!python/object:os.system ", "!!binary ", "!!int ", "!!set ", "%YAML 9.9\n", "---\n", "...\n", "#", "'", '"',
    "|\n", ">-\n", "\0", "\x1b", "\x85", "\u2028", "\ufeff", "9" * 5000, "0x" + "f" * 5000, ".inf", "1:30",
    "2024-99-99", "null", "true: 1\n", "1: 2\n", "~: 3\n", "[" * 300, "{a: " * 300, BOMB, "=", "seed: 1\nseed: 2\n",
    "@", "`", "\\ud800", '"\\ud800"', ",", "\r", "plugins: []\n",
]  # fmt: skip
ROWS = [
    '{"prompt": "1+1=", "answer": "2"}', '{"messages": [{"role": "user", "content": "hi"}]}', "[1]", "3", "null",
    '"x"', "{}", '{"prompt": null}', '{"prompt": [[[]]]}', '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "\\ud800"}', '{"a": NaN}', '{"prompt": ' + "9" * 5000 + "}", '{"prompt": ' + "[" * 100_000,
    '{"prompt": ' + "[" * 99 + "]" * 99 + "}", '{"prompt": "' + "x" * 100_000 + '"}', '{"\\u0000": 1}',
    '{"prompt": {"role": 1}}', '{"prompt": [1, {"role": "user"}]}',
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "model": str(tiny_model),
        "data": "arithmetic",
        "environment": "math",
        "policy": {"init": "random", "optimizer": {"lr": 0.001}},
        "validation": {"every": 0},
        "loggers": [{"name": "tensorboard"}],
    }


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    def hang(*_: object) -> None:
        pytest.fail(f"one input took more than {SECONDS_EACH} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, hang)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEBIBYTES, f"peak memory grew by {grown:.0f} MiB"


def outcome(read: Callable[[], object], shown: object) -> int:
    """The exit code of the command line: 0, or 2 with one message. Anything else fails with the input."""
    signal.alarm(SECONDS_EACH)
    try:
        read()
    except NemorlError as error:
        text = str(error)
        assert text.strip(), "a refusal says something"
        assert "Traceback" not in text
        assert len(text) < 100_000, f"a message of {len(text)} characters"
        return 2
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {ascii(shown)[:2000]}") from error
    finally:
        signal.alarm(0)
    return 0


def mutated(text: str, chance: random.Random) -> str:
    """The text with one to three snippets put in, lines repeated, or parts cut."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        at = chance.randint(0, len(text))
        match chance.randrange(4):
            case 0 | 1:
                text = text[:at] + chance.choice(SNIPPETS) + text[at:]
            case 2:
                lines = text.splitlines(keepends=True) or [""]
                lines.insert(chance.randint(0, len(lines)), chance.choice(lines))
                text = "".join(lines)
            case _:
                text = text[:at] + text[at + chance.randint(1, 3) :]
    return text


def encoded(text: str, chance: random.Random) -> bytes:
    """Mostly UTF-8; sometimes another encoding, or with bytes that are no text."""
    content = text.encode(chance.choice(["utf-8"] * 18 + ["utf-16", "utf-8-sig"]), errors="replace")
    if chance.random() < 0.05:
        at = chance.randint(0, len(content))
        content = content[:at] + chance.randbytes(3) + content[at:]
    return content


def changed(base: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The config with one to three values replaced, at known paths and at some that do not exist."""
    data = json.loads(json.dumps(base))
    paths = [*field_paths(registry().load("algorithms", "grpo")), "no.such", "data.path", "environment.timeout_s"]
    for _ in range(chance.randint(1, 3)):
        *parents, last = chance.choice(paths).split(".")
        target = data
        for key in parents:
            if not isinstance(target.get(key), dict):
                target[key] = {}
            target = target[key]
        target[last] = chance.choice(VALUES)
    return data


Case = tuple[Callable[[], object], object]
"""What reads an input, and the input as a failure shows it."""


def yaml_case(base: dict[str, Any], folder: Path, chance: random.Random) -> Case:
    path = folder / "c.yaml"
    path.write_bytes(content := encoded(mutated(COMMENT + yaml.safe_dump(base), chance), chance))
    return lambda: load_config(path, for_launch=True), content


def json_case(base: dict[str, Any], folder: Path, chance: random.Random) -> Case:
    path = folder / "c.json"
    path.write_bytes(content := encoded(mutated(json.dumps(base, indent=1), chance), chance))
    return lambda: load_config(path), content


def value_case(base: dict[str, Any], folder: Path, chance: random.Random) -> Case:
    data = changed(base, chance)
    return lambda: load_config(data, for_launch=True), data


def override_case(base: dict[str, Any], folder: Path, chance: random.Random) -> Case:
    keys = [
        "seed",
        "policy.optimizer.lr",
        "data.path",
        "loggers.0",
        "plugins.prefer",
        "a..b",
        "",
        "=",
        "model",
        "\udcff",
    ]
    override = f"{chance.choice(keys)}={mutated(str(chance.choice(VALUES)), chance)}"
    return lambda: load_config(base, [override]), override


def row_case(base: dict[str, Any], folder: Path, chance: random.Random) -> Case:
    lines = [chance.choice(ROWS[:2]) for _ in range(3)] + [chance.choice(ROWS)] * chance.randint(0, 1)
    rows = "\n".join(lines) if chance.random() < 0.5 else mutated("\n".join(lines), chance)
    path = folder / chance.choice(["t.jsonl", "t.jsonl", "t.json", "t.csv"])
    path.write_bytes(content := encoded(rows, chance))
    return lambda: list(rows_of(path, "train") or ()), content


def test_a_thousand_odd_inputs_are_read_or_refused(base: dict[str, Any], tmp_path: Path) -> None:
    chance = random.Random(20261122)
    kinds = (yaml_case, json_case, value_case, override_case, row_case)
    codes: dict[str, set[int]] = {kind.__name__: set() for kind in kinds}
    for number in range(INPUTS):
        kind = kinds[number % len(kinds)]
        codes[kind.__name__].add(outcome(*kind(base, tmp_path, chance)))
    # A kind that is always read, or always refused, would test nothing.
    assert all(found == {0, 2} for found in codes.values()), codes
