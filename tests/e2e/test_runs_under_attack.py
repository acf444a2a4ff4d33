"""A run whose gateway and endpoint for Prometheus are held open by strangers ends as others do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from agent_program import PROGRAM
from attacks import under
from nemorl_testing.models import tiny_model

FILES = 1024


def listening(pid: int) -> list[tuple[str, int]]:
    """Where a process and those that it started take connections."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            listens = (each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
            found += [(each.laddr.ip, each.laddr.port) for each in listens]
    return found


@pytest.mark.slow
def test_a_run_under_attack_finishes(tmp_path: Path) -> None:
    program, run = tmp_path / "agent.py", tmp_path / "run"
    program.write_text(PROGRAM)
    (tmp_path / "reward.py").write_text("def share(prompt, response):\n    return float(len(response) > 2)\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+2="}) + "\n" for a in range(2, 10)))
    agent = {"command": ["python", "-S", str(program)], "reward": f"{tmp_path / 'reward.py'}:share"}
    config = {
        "algorithm": "grpo",
        "model": str(tiny_model()),
        "data": {"name": "file", "path": str(tmp_path / "rows.jsonl")},
        "environment": {"name": "agent", **agent},
        "policy": {"init": "random", "max_sequence_tokens": 64},
        "generation": {"max_new_tokens": 6},
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "validation": {"every": 0, "at_end": False},
        "loggers": [{"name": "prometheus", "port": 0}],
        "max_steps": 4,
        "run_dir": str(run),
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    log = tmp_path / "log"
    limited = ["bash", "-c", f'ulimit -n {FILES}; exec "$@"', "-", str(Path(sys.executable).with_name("nemorl"))]
    with log.open("w") as said:
        running = subprocess.Popen([*limited, "train", str(tmp_path / "run.json")], stdout=said, stderr=said)
    while len(places := listening(running.pid)) < 2:  # the gateway's and that of the endpoint
        assert running.poll() is None, log.read_text()
        time.sleep(0.02)
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(under("half-open", place))
        assert running.wait(240) == 0, log.read_text()
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "finished"
    assert "failed" not in events
    assert "the gateway has too many connections" in log.read_text()
    assert log.stat().st_size < 100_000
    assert "Traceback" not in log.read_text()
