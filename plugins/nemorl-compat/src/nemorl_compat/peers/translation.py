"""From a config of TRL, verl or OpenRLHF to one of nemorl: the table judges every key, the system's parts make values.

The classes of keys, the report and the refusal of what would be lost are those of the migration from NeMo RL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.key_table import Outcome, is_among
from nemorl_compat.migration import NO_EFFECT, Change, Migration, assembled, options_of
from nemorl_compat.peers import openrlhf, trl, verl
from nemorl_compat.peers.reading import FAMILIES, Given, ScriptRun, read
from nemorl_compat.peers.tables import Entry, Table, table

Part = Callable[[Given, Pieces], None]
PARTS: Mapping[str, Sequence[Part]] = {"trl": trl.PARTS, "verl": verl.PARTS, "openrlhf": openrlhf.PARTS}


def translate_file(
    path: Path,
    system: str,
    *,
    family: str | None = None,
    allow_loss: Iterable[str] = (),
    run: ScriptRun | None = None,
) -> Migration:
    """A config or script of another system, translated.

    Args:
        path: The file.
        system: ``trl``, ``verl`` or ``openrlhf``.
        family: One of ``FAMILIES``, where the file does not say it.
        allow_loss: Patterns of old keys that may be lost.
        run: How a script is to be read.

    Raises:
        DataError: the file cannot be read.
        UsageError: it is of no run that is translated.
    """
    return translate(read(path, system, family, run), allow_loss=allow_loss)


def translate(given: Given, *, allow_loss: Iterable[str] = ()) -> Migration:
    """A config that was read, translated; as :func:`translate_file`."""
    given.family = given.family or _family(given)
    if given.family not in FAMILIES[given.system]:
        raise UsageError(
            f"{given.family} of {table(given.system).system} is not translated",
            fix=f"{', '.join(FAMILIES[given.system])} are",
        )
    known = table(given.system)
    judged = {key: _judged(known, given, key, value) for key, value in given.values.items()}
    new = _made(known, given, judged)
    judged |= _without_effect(known, given, new, judged)
    _leave_out_foreign(known, given, new, judged)
    for key, found in new.findings.items():
        if key not in judged or judged[key].kind != "neutral":
            judged[key] = found
    patterns = tuple(allow_loss)
    changes = [
        Change(key, given.values.get(key), outcome, any(fnmatchcase(key, pattern) for pattern in patterns))
        for key, outcome in judged.items()
    ]
    changes += [Change(name, value, Outcome("different", text)) for name, (value, text) in given.decisions.items()]
    return assembled(new.values, changes, for_launch=False)


def _made(known: Table, given: Given, judged: Mapping[str, Outcome]) -> Pieces:
    """The new config before what the algorithm has no option for is left out."""
    new = Pieces()
    new.put("algorithm", given.family)
    _put_renamed(known, given, new, judged)
    for part in PARTS[given.system]:
        part(given, new)
    return new


def _without_effect(known: Table, given: Given, new: Pieces, judged: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Keys that have a place here, and whose value nonetheless changes nothing: the result is the same without them."""
    found: dict[str, Outcome] = {}
    for key in [key for key, outcome in judged.items() if outcome.kind == "mapped" and key not in new.findings]:
        others = {other: value for other, value in given.values.items() if other != key}
        without = _made(known, replace(given, values=others), judged)
        if (without.values, without.findings) == (new.values, new.findings):
            is_default = is_among(given.values[key], known.options.get(key, ()))
            found[key] = Outcome("neutral", "same") if is_default else Outcome("different", NO_EFFECT)
    return found


def _family(given: Given) -> str:
    found = {"trl": trl.family, "verl": verl.family, "openrlhf": openrlhf.family}[given.system](given)
    if found is None:
        raise UsageError(
            "this config does not say what it is for",
            fix=f"give --algorithm {'|'.join(FAMILIES[given.system])}, or the command that runs it",
        )
    return found


def _judged(known: Table, given: Given, key: str, value: Any) -> Outcome:
    entry = known.find(key, given.family)
    if entry is None:
        elsewhere = known.find(key)
        if elsewhere is not None:
            return Outcome("different", f"it is of {', '.join(elsewhere.only)} and means nothing here")
        names = [name for e in known.entries for name in e.keys if "*" not in name]
        return Outcome("unknown", did_you_mean(key, names) or "")
    row = entry.row
    if is_among(value, row.get("values", ())):
        return Outcome("neutral", "same")
    if "to" in row and "neutral" not in row:
        return Outcome("mapped", to=row["to"])
    if is_among(value, known.options.get(key, ())):
        return Outcome("neutral", "same")  # what is the default says what is meant where it is absent
    if "neutral" in row:
        return Outcome("neutral", row["neutral"])
    return Outcome("different", row["differs"]) if "differs" in row else Outcome("missing", row["missing"])


def _put_renamed(known: Table, given: Given, new: Pieces, judged: Mapping[str, Outcome]) -> None:
    """Values that only have another name, and the other system's defaults of those that are absent."""
    for entry in known.entries:
        target = entry.row.get("to")
        if target is None or "part" in entry.row or "neutral" in entry.row:
            continue
        if entry.only and given.family not in entry.only:
            continue
        present = [key for key in entry.keys if given.has(key) and judged[key].kind == "mapped"]
        if present:
            new.put(target, given.values[present[0]])
        elif "default" in entry.row:
            new.put(target, entry.row["default"])


def _leave_out_foreign(known: Table, given: Given, new: Pieces, judged: dict[str, Outcome]) -> None:
    """Values that the algorithm has no option for: a feature it lacks, if the config asks for it."""
    algorithm = str(new.values["algorithm"])
    options = options_of(algorithm)
    for path in [path for path in new.values if path.partition(".")[0] not in options and path != "model"]:
        del new.values[path]
        for key, outcome in list(judged.items()):
            if outcome.kind == "mapped" and _leads_to(known.find(key, given.family), path):
                judged[key] = Outcome("missing", f"{path} of {algorithm}")


def _leads_to(entry: Entry | None, path: str) -> bool:
    return entry is not None and f"{path}.".startswith(f"{entry.row.get('to')}.")
