"""What goes out beside the wheels: notes, a bill of materials, checksums and their signature."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

from building import ROOT
from steps import Facts, StepFailedError, run, tool

MAX_NOTES_LINES = 60
NAMESPACE = "nemorl-release"
"""What a signature is for; one made for another purpose does not verify."""
SUMS = "SHA256SUMS"
BILL = "sbom.cdx.json"


def notes_of(changelog: str, version: str) -> str:
    r"""The section of a version, with its heading as a title.

    Raises:
        StepFailedError: It has none, or one of more than 60 lines.

    >>> notes_of("# Changelog\n\n## [0.2.0] - 2027-01-01\n\n- New.\n\n## [0.1.0]\n\n- Old.\n", "0.2.0")
    '# nemorl 0.2.0\n\n- New.\n'
    """
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise StepFailedError(f"CHANGELOG.md has no section [{version}]")
    notes = f"# nemorl {version}\n\n{found[1].strip()}\n"
    if (lines := notes.count("\n")) > MAX_NOTES_LINES:
        raise StepFailedError(f"the notes have {lines} lines, more than {MAX_NOTES_LINES}: shorten them")
    return notes


def write_notes(out: Path, version: str) -> Facts:
    """``NOTES.md``, from the changelog."""
    notes = notes_of((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
    (out / "NOTES.md").write_text(notes, "utf-8")
    return {"lines": notes.count("\n")}


def write_bill(out: Path, python: Path, epoch: str) -> Facts:
    """``sbom.cdx.json``: what an environment holds, in CycloneDX, without what would differ the next time."""
    file = out / BILL
    words = ("--output-reproducible", "--pyproject", ROOT / "pyproject.toml", "-o", file, python)
    run(tool("cyclonedx-py"), "environment", *words, env={**os.environ, "SOURCE_DATE_EPOCH": epoch})
    return {"components": len(json.loads(file.read_text("utf-8"))["components"]), "bytes": file.stat().st_size}


def write_sums(out: Path) -> Facts:
    """``SHA256SUMS`` of every file here, as ``sha256sum --check`` reads it."""
    files = sorted(file for file in out.iterdir() if file.is_file() and not file.name.startswith((SUMS, ".")))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (out / SUMS).write_text("".join(lines), "utf-8")
    return {"files": len(files)}


def sign(out: Path, key: Path | None, trial: Path) -> Facts:
    """``SHA256SUMS.sig`` by an SSH key, verified at once.

    Args:
        out: Where the sums are. ``allowed_signers`` is written beside them.
        key: The private key, or a public one whose private half is in the agent or on a token. Without one a key is
            made for the occasion: it shows that the steps work, and not who signed.
        trial: Where that key is put.
    """
    if key is None:
        trial.unlink(missing_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "trial", "-f", trial)
    used = key or trial
    (out / f"{SUMS}.sig").unlink(missing_ok=True)
    run("ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", used, out / SUMS)
    public = used if used.suffix == ".pub" else used.with_name(f"{used.name}.pub")
    algorithm, text, *_ = public.read_text("utf-8").split()
    signers = f'releases namespaces="{NAMESPACE}" {algorithm} {text}\n'
    (out / "allowed_signers").write_text(signers, "utf-8")
    verify(out)
    return {"by": "the given key" if key else "A TRIAL KEY, made now: no release"}


def verify(out: Path) -> None:
    """What a receiver does: the signature is of these sums, and the sums of these files.

    Raises:
        StepFailedError: One of them is not.
    """
    words = (
        "-Y",
        "verify",
        "-n",
        NAMESPACE,
        "-I",
        "releases",
        "-f",
        out / "allowed_signers",
        "-s",
        out / f"{SUMS}.sig",
    )
    with (out / SUMS).open("rb") as sums:
        done = subprocess.run(["ssh-keygen", *words], stdin=sums, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StepFailedError(f"the signature does not verify: {done.stderr or done.stdout}")
    for line in (out / SUMS).read_text("utf-8").splitlines():
        wanted, _, name = line.partition("  ")
        if not (out / name).is_file() or hashlib.sha256((out / name).read_bytes()).hexdigest() != wanted:
            raise StepFailedError(f"{name} is not what was signed")
