"""Makes a release of the commit that is checked out, and uploads nothing: ``make release``, docs/releasing.md.

    python tools/release/run.py --pythons 3.11,3.12 --key ~/.ssh/id_ed25519

Steps: build (twice, byte-equal), check, install (every wheel and extra on every Python) and quickstart, licences, bill,
notes, sums, signature. Each is done once: the same command goes on behind what was interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue

import building
import installing
import licences
import metadata
import papers
from building import ROOT
from licences import Licence
from steps import Facts, Ledger, StepFailedError, find_python, run, say, told

ENVIRONMENTS = 4
"""At a time: some link files while others load what they installed."""


def release(out: Path, pythons: tuple[str, ...], key: Path | None) -> list[str]:
    """All steps.

    Returns:
        What was not run, and why.
    """
    commit = run("git", "-C", ROOT, "rev-parse", "HEAD").strip()
    if run("git", "-C", ROOT, "status", "--porcelain").strip():
        say("uncommitted changes are left out: what is built is the commit")
    built, work = out / "files", out / "work"

    Ledger(work / "steps", commit).once("build", lambda: building.build(built, commit))
    ledger = Ledger(work / "steps", building.digest(built))
    checked = ledger.once("check", lambda: metadata.check(built))
    found = {version: find_python(version) for version in pythons}
    missing = [f"Python {version}: {why}" for version, why in found.items() if isinstance(why, str)]
    ready = {version: path for version, path in found.items() if isinstance(path, Path)}
    if not ready:
        raise StepFailedError("no Python to install on:\n" + "\n".join(missing))
    installed, found_licences = install_everywhere(ledger, ready, built, work)
    say(f"licences{told(licences.judge(found_licences))}")
    ledger.once("bill", partial(write_bill, work, next(iter(ready.values())), built, commit))
    shutil.copy(work / papers.BILL, built)
    say(f"notes: {papers.write_notes(built, checked['version'])['lines']} lines")
    say(f"sums: {papers.write_sums(built)['files']} files")
    say(f"signature: {papers.sign(built, key, work / 'trial-key')['by']}")
    for leftover in (*work.glob("environment-*"), *work.glob("quickstart-*")):
        shutil.rmtree(leftover)
    return missing + [f"{name}: {why}" for name, facts in installed.items() if (why := facts.get("not_installed"))]


def install_everywhere(
    ledger: Ledger, pythons: Mapping[str, Path], built: Path, work: Path
) -> tuple[dict[str, Facts], set[Licence]]:
    """The quickstart, and each target, on each Python.

    Returns:
        ``nemorl-agents[mcp] on 3.12`` -> what was found; the licences of all that was installed.

    Raises:
        StepFailedError: with every one that failed, after all have been tried.
    """
    known: set[Licence] = set()
    places: Queue[Path] = Queue()
    for number in range(ENVIRONMENTS):
        places.put(work / f"environment-{number}")

    def one(version: str, wanted: str) -> Facts:
        place = places.get()
        try:
            name = installing.step_name(version, wanted)
            install = partial(installing.install, place, pythons[version], built, wanted, frozenset(known))
            facts = ledger.once(name, install)
            known.update(Licence(*line) for line in facts.get("licences", ()))
            return facts
        finally:
            places.put(place)

    def train(version: str) -> Facts:
        quickstart = partial(installing.quickstart, work / f"quickstart-{version}", pythons[version], built)
        return ledger.once(f"quickstart-{version}", quickstart)

    pairs = [(version, wanted) for version in pythons for wanted in installing.targets()]
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        # The quickstarts first, as they take longest.
        trained = {f"quickstart on {version}": pool.submit(train, version) for version in pythons}
        waiting = {f"{wanted} on {version}": pool.submit(one, version, wanted) for version, wanted in pairs}
    failed = {name: str(error) for name, future in {**trained, **waiting}.items() if (error := future.exception())}
    if failed:
        raise StepFailedError("\n".join(f"{name}: {why}" for name, why in failed.items()))
    return {name: future.result() for name, future in waiting.items()}, known


def write_bill(work: Path, python: Path, built: Path, commit: str) -> Facts:
    """The bill of materials of ``nemorl[all]``, in the work folder: steps that are done leave it there."""
    place = work / "environment-bill"
    inside = installing.make_environment(place, python, built, "nemorl[all]")
    return papers.write_bill(work, inside, building.changed_at(commit))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", default=",".join(metadata.PYTHONS), help="to install on, e.g. 3.11,3.12")
    parser.add_argument("--key", type=Path, help="SSH key that signs the checksums")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release")
    options = parser.parse_args()
    try:
        not_run = release(options.out.resolve(), tuple(options.pythons.split(",")), options.key)
    except StepFailedError as error:
        say(f"NO RELEASE: {error}")
        return 1
    left_out = [f"Python {version}: not asked for" for version in metadata.PYTHONS if version not in options.pythons]
    for line in (*left_out, *not_run):
        say(f"NOT RUN: {line}")
    say(f"{options.out / 'files'}: complete; nothing was uploaded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
