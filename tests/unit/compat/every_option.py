"""Every option of another training system, changed once: the new config is another one, or the report says why not.

The options of a system are data: ``nemorl_compat/peers/NAME_options.tsv``, which its table names under ``options``.
A line has a name (or several, in braces), a type and a default as JSON, with tabs between:

    adam_beta1	float	0.9
    beta	float	0.0 | 0.1
    algo.kl.estimator	k1|k2|k3	"k1"

Several defaults, with ``|`` between, are those of different trainers. Types are ``bool``, ``int``, ``float``, ``str``,
``list`` and ``dict``, or the words that are allowed. The file is made from the system's own code, never by hand, and
its first line says from which version.

``silent(system, bases)`` is what a test asserts to be empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from nemorl.errors import DataError, UsageError
from nemorl_compat.key_table import unbraced
from nemorl_compat.peers.reading import Given
from nemorl_compat.peers.tables import table
from nemorl_compat.peers.translation import translate

OPENRLHF: Mapping[str, Any] = {
    "pretrain": "org/model",
    "advantage_estimator": "group_norm",
    "n_samples_per_prompt": 8,
    "use_kl_loss": True,
    "kl_estimator": "k3",
    "colocate_all_models": True,
}
"""A run of GRPO."""
CHANGES: Mapping[str, Sequence[Any]] = {
    "int": (3, 7, 64),
    "float": (0.37, 0.75, 2.0),
    "str": ("other", "org/other", "none"),
    "list": (["other"], [0.25, 0.75]),
    "dict": ({"other": 1},),
}
"""Values to change an option to, by its type; each of them has to show."""


def options(system: str) -> Mapping[str, str]:
    """Name of each option of a system, as its table calls it -> type."""
    lines = (files("nemorl_compat.peers") / f"{system}_options.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    aliases = table(system).aliases
    return {aliases.get(name, name): kind for names, kind, _ in rows for name in unbraced(names)}


def silent(
    system: str, bases: Mapping[str, Mapping[str, Any]], words: Mapping[str, Sequence[Any]], every: int = 1
) -> list[str]:
    """Options, as ``family: option = value``, whose change neither shows in the new config nor is named by the report.

    Args:
        system: Name of a table.
        bases: Family -> a config that is translated; what it gives is changed too.
        words: Option -> values that it takes, where any text would not do.
        every: One option in so many is changed, others in each family.
    """
    found = []
    for number, (family, base) in enumerate(bases.items()):
        before = translate(Given(system, dict(base), family)).config
        for option, kind in list(options(system).items())[number % every :: every]:
            for value in _changes(system, option, kind, base, words.get(option)):
                if not _shows(system, family, base, before, option, value):
                    found.append(f"{family}: {option} = {value!r}")
    return found


def _changes(
    system: str, option: str, kind: str, base: Mapping[str, Any], words: Sequence[Any] | None
) -> Iterator[Any]:
    defaults = table(system).options[option]
    if words is not None:
        candidates: Sequence[Any] = words
    elif kind == "bool":
        candidates = (True, False)
    else:
        candidates = CHANGES.get(kind) or kind.split("|")
    yield from (value for value in candidates if value not in defaults and value != base.get(option))


def _shows(
    system: str, family: str, base: Mapping[str, Any], before: Mapping[str, Any], option: str, value: Any
) -> bool:
    try:
        made = translate(Given(system, {**base, option: value}, family))
    except (DataError, UsageError):
        return True  # it is refused by name
    outcome = next(change.outcome for change in made.changes if change.key == option)
    if outcome.kind == "mapped":
        return made.config != before or bool(made.problems) or any(c.outcome.kind == "missing" for c in made.changes)
    entry = table(system).find(option, family)
    if outcome.kind == "neutral":  # then a row says so of this very option, and not of this value as if it were usual
        return entry is not None and outcome.text == entry.row.get("neutral") and option in entry.keys
    return bool(outcome.text) or outcome.kind == "unknown"
