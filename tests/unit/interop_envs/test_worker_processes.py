"""Scripts under another interpreter: asked, cancelled, lost and ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nemorl.errors import BackendError, UsageError
from nemorl.media import Media
from nemorl_agents.interop.processes import WorkerProcess
from recorded_messages import Raises

SCRIPT = """
import json, sys, time
def say(number, **said):
    print(json.dumps({"number": number, **said}), flush=True)
print("woke up", file=sys.stderr, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    verb, number = asked["verb"], asked["number"]
    if verb == "echo": say(number, result=asked["text"])
    if verb == "talk":
        for _ in range(20000): say(0, result="what nobody waits for")
        say(number, result="done")
    if verb == "fail": say(number, error="ValueError: 7")
    if verb == "tell": say(number, told="no such taskset")
    if verb == "cancel": say(0, result=None); print("cancelled", number, file=sys.stderr, flush=True)
    if verb == "die": print("out of cheese", file=sys.stderr, flush=True); sys.exit(3)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    found = WorkerProcess([sys.executable, "-S", str(script)], "the toy", variables={})
    yield found
    found.close()


def test_answers_reach_whoever_asked(worker: WorkerProcess) -> None:
    async def many() -> list[str]:
        return await asyncio.gather(*(worker.ask("echo", text=f"{n}\n") for n in range(20)))

    assert asyncio.run(many()) == [f"{n}\n" for n in range(20)]


def test_an_image_in_a_question_is_a_data_url(worker: WorkerProcess) -> None:
    assert worker.ask_now("echo", within_s=10.0, text=Media("image", b"GIF89a")) == "data:image/gif;base64,R0lGODlh"


def test_errors_are_the_workers(worker: WorkerProcess, raises: Raises) -> None:
    with raises(BackendError, "ValueError", 7):
        worker.ask_now("fail", within_s=30)
    with raises(UsageError):
        worker.ask_now("tell", within_s=30)
    with raises(BackendError, 0):
        worker.ask_now("wait", within_s=0.1)


def test_a_long_question_waits_for_a_process_that_talks_and_is_heard_meanwhile(worker: WorkerProcess) -> None:
    async def both() -> list[str]:
        return await asyncio.wait_for(asyncio.gather(worker.ask("talk"), worker.ask("echo", text="x" * 5_000_000)), 60)

    # A pipe holds less than either of them says: the process reads on once it is heard.
    answers = ThreadPoolExecutor(1).submit(asyncio.run, both()).result(60)
    assert (answers[0], len(answers[1])) == ("done", 5_000_000)


def test_a_cancelled_question_is_cancelled_over_there(worker: WorkerProcess) -> None:
    async def cancelled() -> str:
        waiting = asyncio.ensure_future(worker.ask("wait"))
        await asyncio.sleep(0)  # until it is asked
        await worker.ask("echo", text="asked later, so the first is under way")
        waiting.cancel()
        await asyncio.wait([waiting])
        return await worker.ask("echo", text="still here")

    assert asyncio.run(cancelled()) == "still here"
    worker.close()
    worker._log.join(30)  # who reads what it wrote may be behind
    assert "cancelled 1" in list(worker._tail)


def test_a_process_that_dies_says_what_it_wrote(worker: WorkerProcess, raises: Raises) -> None:
    with pytest.raises(BackendError) as caught:
        worker.ask_now("die", within_s=30)
    first, *rest = str(caught.value).split("woke up")
    assert "3" in first
    assert "out of cheese" in rest[0]
    with raises(BackendError):
        worker.ask_now("echo", within_s=30, text="?")


def test_a_missing_interpreter_is_told(tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError):
        WorkerProcess([str(tmp_path / "python")], "the toy", variables={})
