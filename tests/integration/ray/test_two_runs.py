"""Two runs on one machine, with Ray each: they share nothing, and the end of one is nothing to the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from nemorl.base.files import process_guard
from nemorl_insight.doctor.left_folders import left_folders, usual_places

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

RUN = """
import json, sys
import nemorl
from nemorl.contracts.display import Silence

class Told:
    def on_step_end(self, step):
        if step == 1:
            import ray
            print(json.dumps({"ray": ray.get_runtime_context().gcs_address}), flush=True)
            sys.stdin.readline()

config = nemorl.load_config({
    "algorithm": "grpo", "model": sys.argv[1], "run_dir": sys.argv[2], "max_steps": 2,
    "policy": {"init": "random", "max_sequence_tokens": 32}, "generation": {"max_new_tokens": 2},
    "num_prompts_per_step": 1, "num_generations_per_prompt": 2, "validation": {"at_end": False},
    "checkpoint": {"export": False},
    "cluster": {"launcher": "ray", "workers_per_node": 2, "colocated": False, "cpus_per_worker": 0.5,
                "weight_transport": "shared_memory"},
})
rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
result = config.build().fit(rows, lambda prompt, response: float(len(response)), callbacks=[Told()], console=Silence())
print(json.dumps({"steps": result.steps}), flush=True)
"""


class TinyRun:
    """A run in a process of its own, which waits after its first step."""

    def __init__(self, model: Path, folder: Path) -> None:
        command = [sys.executable, "-c", RUN, str(model), str(folder)]
        self._log = folder.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._log.read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    @property
    def processes(self) -> list[psutil.Process]:
        """Everything that was started for it, also what is no child of it any more."""
        driver = psutil.Process(self.process.pid)
        marked = {folder for folder in map(_folder_of, driver.children(recursive=True)) if folder is not None}
        known = {pid for folder in marked for pid in process_guard.processes(folder)}
        return [driver, *(psutil.Process(pid) for pid in known)]


def _folder_of(process: psutil.Process) -> Path | None:
    try:
        name = process.environ().get(process_guard.MARK)
    except psutil.Error:
        return None
    return None if name is None else Path(name)


@pytest.fixture
def runs(tiny_model: Path, tmp_path: Path) -> Iterator[list[TinyRun]]:
    found = [TinyRun(tiny_model, tmp_path / name) for name in ("one", "two")]
    yield found
    for run in found:
        run.process.kill()
        run.process.communicate()


def ports(processes: list[psutil.Process]) -> set[int]:
    """On which they listen."""
    return {c.laddr.port for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def memory_files(processes: list[psutil.Process]) -> set[tuple[int, int]]:
    """Shared memory that they have open, by device and inode."""
    found = set()
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").glob("*"):
            try:
                target, facts = os.readlink(link), link.stat()
            except OSError:
                continue
            if target.startswith(("/memfd:nemorl", "/dev/shm/")):
                found.add((facts.st_dev, facts.st_ino))
    return found


def test_two_runs_share_nothing_and_what_a_killed_one_leaves_is_cleaned(runs: list[TinyRun]) -> None:
    one, two = runs
    assert one.said()["ray"] != two.said()["ray"]
    first, second = one.processes, two.processes
    assert not {p.pid for p in first} & {p.pid for p in second}
    assert ports(first)
    assert not ports(first) & ports(second)
    assert memory_files(first)
    assert not memory_files(first) & memory_files(second)
    folders = [{_folder_of(p) for p in found} - {None} for found in (first, second)]
    assert [len(found) for found in folders] == [1, 1]
    assert not folders[0] & folders[1]

    # The driver and the guard that would have cleaned up after it, as the out-of-memory killer takes them.
    (folder,) = (path for path in folders[0] if path is not None)
    driver = psutil.Process(one.process.pid)
    for process in [*[p for p in driver.children() if str(process_guard.__file__) in p.cmdline()], driver]:
        os.kill(process.pid, signal.SIGKILL)
    one.process.wait()
    (left,) = [left for left in left_folders(usual_places()) if left.folder == folder]
    assert left.remove()
    assert process_guard.processes(folder) == []
    two.go_on()
    assert two.said() == {"steps": 2}
    assert two.process.wait(120) == 0
    assert not any(left.folder in folders[1] for left in left_folders(usual_places()))
