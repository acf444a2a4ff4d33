"""``pytest -m gpu`` over the files that have such tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from _figures import parse

ERROR_CHARACTERS = 1500
"""Of a failure's text that are kept, from its end."""


def root() -> Path:
    """The folder with ``tests``: beside this file in the archive, above it in the repository."""
    return next(folder for folder in Path(__file__).parents if (folder / "tests" / "conftest.py").is_file())


def marked_files(folder: Path) -> list[str]:
    """Files with tests for a GPU: others may need what is not installed, and would not be collected."""
    here = sorted((folder / "tests").rglob("test_*.py"))
    return [str(path) for path in here if "pytest.mark.gpu" in path.read_text()]


def main() -> None:
    options = parse()
    outcome = options.json.with_name("tests.xml")
    plugins = ["-p", "no:cacheprovider", "-c", str(root() / "pyproject.toml"), "--rootdir", str(root())]
    flags = ["-q", "-m", "gpu", "--continue-on-collection-errors", "--junitxml", str(outcome), "--durations=10"]
    command = [sys.executable, "-m", "pytest", *plugins, *flags, *marked_files(root())]
    subprocess.run(command, check=False)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(outcome).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        problems = [child for child in case if child.tag in ("failure", "error")]
        if problems:
            counts["failed"] += 1
            options.figures.fail(name, (problems[0].text or "")[-ERROR_CHARACTERS:])
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    options.figures.add("tests", counts)
    if options.is_cuda and not counts["passed"]:
        options.figures.fail("tests", "no test for a GPU ran")


if __name__ == "__main__":
    main()
