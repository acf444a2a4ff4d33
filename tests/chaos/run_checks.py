"""Whether a run that met faults kept what nemorl promises: compared, file by file, with one that met none."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import CheckpointError
from nemorl.storage.checkpoints import Checkpoint
from nemorl.types import BEGINNINGS, ENDINGS

TIMED = re.compile(
    r"^(time|step_time|timing/|performance/|system/|replication/|.*_s$|.*/mean_.*_time|.*/judge_retries$"
    r"|(train/)?weights_proven$)"  # a receipt is due by the clock
)
"""Names of metrics and columns that say how long something took, when it was, and what else the machine did."""
PRUNABLE = re.compile(r"^checkpoints/step_\d+(/|$)|^records$")
"""Names of files that may be there."""
RANDOM = re.compile(r"/rng-\d+\.")
"""Files of the states of random generators."""
RECORDS_LOST = "rollouts are not recorded"


def broken_promises(place: Path) -> Iterator[str]:
    """What no end of a life may leave: a half checkpoint by the name of a whole one, an announced one missing."""
    sound = [_step(path) for path in (place / "set_aside").glob("*/checkpoints/step_*")]
    for path in sorted((place / "checkpoints").glob("step_*")):
        try:
            Checkpoint.read(path).verify()
        except CheckpointError as error:
            yield f"a half checkpoint has the name of a whole one: {error}"
        else:
            sound.append(_step(path))
    announced = [event["step"] for event in events(place) if event["event"] == "checkpoint"]
    if announced and max(sound, default=0) < announced[-1]:
        yield f"the checkpoint of step {announced[-1]} was announced, there are {sound}"


def differences(
    whole: Path, place: Path, *, records_may_lack: bool = False, same_generators: bool = True
) -> Iterator[str]:
    """What the end of a run has otherwise than an undisturbed one.

    Older checkpoints that were not pruned are no difference: ``broken_promises`` looks at them, too.

    Args:
        whole: The undisturbed run.
        place: The other.
        records_may_lack: A kill or a full disk costs the rollout records that were being written (docs/records.md).
        same_generators: The processes of both began with one state of torch's generator, from which nothing here draws.
            Forks of one process do; others begin with states of their own.
    """
    pairs: dict[str, tuple[Any, Any]] = {name: (read(whole), read(place)) for name, read in CONTENT.items()}
    for found in () if same_generators else pairs["checkpoints"]:
        for parts in found.values():
            for name in [name for name in parts if RANDOM.search(name)]:
                del parts[name]
    kept = pairs["checkpoints"][0]
    pairs["checkpoints"] = kept, {name: value for name, value in pairs["checkpoints"][1].items() if name in kept}
    may_lack = records_may_lack or any(RECORDS_LOST in str(event.get("message")) for event in events(place))
    recorded = pairs["records"][1]
    if may_lack:
        pairs["records"] = {name: value for name, value in pairs["records"][0].items() if name in recorded}, recorded
    for name, (one, other) in pairs.items():
        if one != other:
            yield f"other {name}: {_first_difference(one, other)}"
    about_run = [event["event"] for event in events(place) if event["event"] in ENDINGS | BEGINNINGS]
    if about_run[-1:] != ["finished"]:
        yield f"the events of the run are {about_run}"
    there, wanted = files(place), files(whole)
    if left := sorted(name for name in there - wanted if not PRUNABLE.match(name)):
        yield f"left behind: {left}"
    if gone := sorted(name for name in wanted - there if not (may_lack and name.startswith("records"))):
        yield f"missing: {gone}"


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def events(place: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(place / "events.jsonl"))


def metrics(place: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not TIMED.match(name)}
        for record in read_jsonl(place / "metrics.jsonl")
    ]


def weights(place: Path) -> dict[str, Any]:
    return {path.name: _digest(path) for path in (place / "model").glob("*.safetensors")}


def checkpoints(place: Path) -> dict[str, Any]:
    """Everything that the next step would depend on; not how long the last took."""
    found: dict[str, Any] = {}
    for path in sorted((place / "checkpoints").glob("step_*")):
        state = json.loads((path / "trainer.json").read_text())
        state["latest"] = {name: value for name, value in state["latest"].items() if not TIMED.match(name)}
        parts = [part for part in path.rglob("*.*") if part.parent != path]
        found[path.name] = {"state": state, **{str(part.relative_to(path)): _digest(part) for part in parts}}
    return found


def records(place: Path) -> dict[str, Any]:
    found = {}
    for path in sorted((place / "records").rglob("*.parquet")):
        table = pq.read_table(path)
        columns = [name for name in table.column_names if name != "run" and not TIMED.match(name)]
        found[str(path.relative_to(place))] = _without_times(table.select(columns).to_pylist())
    return found


def _without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_times(value) for name, value in found.items() if not TIMED.match(name)}
    return [_without_times(value) for value in found] if isinstance(found, list) else found


def files(place: Path) -> set[str]:
    names = {str(path.relative_to(place)) for path in place.rglob("*")}
    return {name for name in names if not name.startswith("set_aside")}


CONTENT = {"metrics": metrics, "weights": weights, "checkpoints": checkpoints, "records": records}


def _first_difference(one: Any, other: Any, where: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *other]:
            if one.get(name) != other.get(name):
                return _first_difference(one.get(name), other.get(name), f"{where}/{name}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return _first_difference(a, b, f"{where}[{number}]")
    return f"{where}: {str(one)[:200]} became {str(other)[:200]}"


def _digest(path: Path) -> Any:
    """Of a file; of safetensors, by tensor: the library draws the order of a file's metadata at random."""
    content = path.read_bytes()
    if path.suffix != ".safetensors":
        return hashlib.sha256(content).hexdigest()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    found = {name: part for name, part in header.items() if name == "__metadata__"}
    for name, part in header.items():
        if name not in found:
            start, end = (size + offset for offset in part.pop("data_offsets"))
            found[name] = {**part, "sha256": hashlib.sha256(content[start:end]).hexdigest()}
    return found
