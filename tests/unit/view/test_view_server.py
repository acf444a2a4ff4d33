"""``nemorl view``: who may ask, what is answered, and a stream that goes on where a browser left it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from nemorl.errors import UsageError
from nemorl_insight.view.guard import HEADERS, host_name
from nemorl_insight.view.server import Server
from nemorl_insight.view.stream import added_to, events, positions_of, written
from nemorl_insight.view.watched import Position, WatchedRun
from record_files import write_records
from recorded_messages import Raises
from starlette.testclient import TestClient

ATTACK = "</script><script>alert(1)</script>\u202e\x1b]0;x\x07"
SITE = "http://127.0.0.1:8000"


def add(path: Path, *records: Any, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def rollout(run: Path, step: int, response: str) -> None:
    group = f"train-{step}-0"
    facts = {"split": "train", "step": step, "group": 0, "group_id": group, "num_turns": 1, "finish_reason": "stop"}
    turns = [{"author": "policy", "text": response, "sequence": 0, "start": 1, "stop": 2}]
    sequence = {"token_ids": [1, 2], "mask": [False, True], "generation_logprobs": [0.0, -1.0]}
    row = {**facts, "prompt": "1+1=", "response": response, "reward": step / 4, "tokens": 1, "turns": turns}
    write_records(run, [{**row, "sample_id": f"{group}-{i}", "sequences": [sequence]} for i in range(2)])


def make_run(folder: Path, seed: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"algorithm: grpo\nmodel: tiny\nseed: {seed}\nmax_steps: 4\n")
    add(folder / "metrics.jsonl", *({"step": s, "time": 100.0 + s, "train/reward": s / 4} for s in (1, 2)))
    add(folder / "events.jsonl", {"time": 100.0, "event": "started"})
    rollout(folder, 1, "first")
    rollout(folder, 2, ATTACK)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    watched = WatchedRun(make_run(tmp_path / "run"), tmp_path / "cache")
    assert watched.follow() is False
    return watched


@pytest.fixture
def client(run: WatchedRun) -> TestClient:
    return TestClient(Server([run], hosts=("127.0.0.1", "localhost", "::1")).app, base_url=SITE)


def test_the_page_runs_no_script_but_its_own(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
    assert policy["frame-ancestors"] == "'none'"
    assert "<script>" not in page.text
    assert "<style" not in page.text
    assert "//" not in page.text.replace("<!doctype html>", "")  # nothing from elsewhere
    assert client.get("/page.js").headers["content-type"].startswith("text/javascript")
    for path in ("/", "/page.js", "/page.css", "/api/info", "/nowhere"):
        assert HEADERS.items() <= dict(client.get(path).headers).items()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "", "0.0.0.0", "[::2]:80"])
def test_a_name_that_somebody_points_here_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/api/info", "/api/runs/0/overview"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "tiny" not in answer.text


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:8000", "LOCALHOST"])
def test_this_machine_by_its_own_names_is_served(client: TestClient, host: str) -> None:
    assert client.get("/api/info", headers={"host": host}).status_code == 200
    assert host_name(host) in ("localhost", "127.0.0.1", "::1")


def test_other_sites_and_whoever_wants_to_change_something_are_refused(client: TestClient) -> None:
    assert client.get("/api/info", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.get("/api/info", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert client.post("/api/info").status_code == 405


def test_beyond_this_machine_a_token_is_needed(run: WatchedRun) -> None:
    client = TestClient(Server([run], hosts=None, token="sesame").app, base_url="http://box:8000")
    for given in ("/", "/?token=", "/?token=wrong", "/api/info?token=sesam"):
        assert client.get(given, follow_redirects=False).status_code == 403
    welcome = client.get("/?token=sesame", follow_redirects=False)
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/")  # no token in what is shown and shared
    assert "httponly" in welcome.headers["set-cookie"].lower()
    assert client.get("/api/info").json()["title"] == "run"
    client.cookies.clear()
    assert client.get("/api/info", headers={"cookie": "nemorl-insight=other"}).status_code == 403


def test_an_address_on_a_command_line_lets_one_browser_in(run: WatchedRun) -> None:
    once = {"seen-by-all"}
    app = Server([run], hosts=["127.0.0.1"], token="sesame", once=once).app
    first, second = (TestClient(app, base_url="http://127.0.0.1:8000") for _ in range(2))
    assert first.get("/?token=seen-by-all").status_code == 200
    assert first.get("/api/info").status_code == 200
    assert second.get("/?token=seen-by-all").status_code == 403, "a neighbour who read it comes too late"
    assert second.get("/api/info").status_code == 403
    assert second.get("/?token=sesame").status_code == 200


def test_two_servers_of_one_machine_do_not_take_each_others_cookies(run: WatchedRun) -> None:
    one, two = (
        TestClient(Server([run], hosts=["127.0.0.1"], token=token).app, base_url=f"http://127.0.0.1:{port}")
        for token, port in (("first", 8001), ("second", 8002))
    )
    two.cookies = one.cookies  # a browser keeps cookies by host, not by port
    assert one.get("/?token=first").status_code == two.get("/?token=second").status_code == 200
    assert one.get("/api/info").status_code == two.get("/api/info").status_code == 200


def test_responses_are_asked_for(client: TestClient) -> None:
    steps = client.get("/api/runs/0/steps").json()
    assert [(step["step"], step["records"], step["reward"]) for step in steps["steps"]] == [(1, 2, 0.25), (2, 2, 0.5)]
    found = client.get("/api/runs/0/responses", params={"search": "fir", "sort": "reward", "limit": 1}).json()
    assert (found["total"], found["rows"][0]["response"]) == (2, "first")
    assert client.get("/api/runs/0/responses", params={"step": 2, "only": "all_wrong,wrong"}).json()["total"] == 2
    whole = client.get("/api/runs/0/response", params={"split": "train", "step": 2, "id": "train-2-0-1"}).json()
    assert whole["turns"][0]["text"] == ATTACK
    assert whole["sequences"][0]["generation_logprobs"] == [0.0, -1.0]
    assert (whole["sequences"][0]["texts"], whole["shown"]) == (None, [])


def test_the_run_as_a_whole(client: TestClient) -> None:
    overview = client.get("/api/runs/0/overview").json()
    cards = {card["title"]: card for card in overview["curves"]["moving"]}
    assert cards["Reward"]["series"] == [{"label": "reward", "values": [0.25, 0.5], "metric": "train/reward"}]
    assert overview["header"]["facts"]["algorithm"] == "grpo"
    told = {row["key"]: (row["value"], row["default"]) for row in overview["settings"]["rows"]}
    assert told["seed"] == ("1", "42")
    assert client.get("/api/runs/0/extra").json()["samples"]["pairs"][0]["prompt"] == "1+1="


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("runs/1/overview", "no run 1"),
        ("runs/0/responses?sort=rewrad", "reward"),
        ("runs/0/responses?only=nobody", "filter"),
        ("runs/0/responses?step=-1", "no number"),
        ("runs/0/responses?limit=1e9", "no number"),
        ("runs/0/response?split=train&step=1&id=x", "no record x"),
        ("runs/0/differences?other=7", "no run 7"),
    ],
)
def test_a_wrong_question_is_told_why(client: TestClient, path: str, said: str) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_two_runs_side_by_side(tmp_path: Path, run: WatchedRun) -> None:
    other = WatchedRun(make_run(tmp_path / "other" / "run", seed=2), tmp_path / "cache")
    client = TestClient(Server([run, other], hosts=("127.0.0.1",)).app, base_url=SITE)
    assert [found["name"] for found in client.get("/api/info").json()["runs"]] == [
        f"{tmp_path.name}/run",
        "other/run",
    ]
    rows = client.get("/api/runs/0/differences", params={"other": 1}).json()
    assert rows == [{"key": "seed", "first": "1", "second": "2", "neutral": False}]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, tmp_path.name):
        WatchedRun(tmp_path, tmp_path / "cache")


# What is added


def read(run: WatchedRun, at: Position) -> tuple[list[dict[str, Any]], Position]:
    messages = []
    for message, after in added_to(run, at):
        messages.append(message)
        at = after
    return messages, at


def test_a_browser_that_comes_back_gets_each_line_once(run: WatchedRun) -> None:
    messages, at = read(run, Position())
    assert [message["kind"] for message in messages] == ["metrics", "events", "records"]
    assert [line["step"] for line in messages[0]["lines"]] == [1, 2]
    assert read(run, at) == ([], at)
    kept = written([at])  # the id that the browser sends when it comes back
    metrics = run.path / "metrics.jsonl"
    add(metrics, {"step": 3, "train/reward": 0.75})
    add(metrics, {"step": 4}, end="")  # still being written
    rollout(run.path, 3, "third")
    run.follow()
    (back,) = positions_of(kept, [run])
    messages, at = read(run, back)
    assert [message["kind"] for message in messages] == ["metrics", "records"]
    assert [line["step"] for line in messages[0]["lines"]] == [3]
    add(metrics)
    messages, _ = read(run, at)
    assert messages == [{"kind": "metrics", "lines": [{"step": 4}]}]


def test_a_run_that_goes_back_says_that_all_is_to_be_read_again(run: WatchedRun) -> None:
    _, at = read(run, Position())
    metrics = run.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    messages, at = read(run, at)
    assert messages == [{"kind": "again"}]
    assert at.metrics == metrics.stat().st_size


@pytest.mark.parametrize("text", ["", "nonsense", "1.2", "1.2.3_4.5.6", "-1.2.3", "1.2.³", "9" * 30 + ".1.1"])
def test_what_is_no_position_of_these_runs_means_now(run: WatchedRun, text: str) -> None:
    assert positions_of(text, [run]) == [run.position]


def test_the_stream_has_ids_to_come_back_with(run: WatchedRun) -> None:
    async def collected() -> list[bytes]:
        found: list[bytes] = []
        async for event in events([run], [Position()], lambda: len(found) == 4):
            found.append(event)
        return found

    retry, *found = anyio.run(collected)
    assert retry == b"retry: 2000\n\n"
    ids = [event.decode().split("\n")[0] for event in found]
    assert ids[-1] == f"id: {run.position}"
    bodies = [json.loads(event.decode().split("\n")[1].removeprefix("data: ")) for event in found]
    assert [(body["run"], body["kind"]) for body in bodies] == [(0, "metrics"), (0, "events"), (0, "records")]


def test_a_request_for_the_stream_ends_with_the_server(run: WatchedRun) -> None:
    def once() -> Iterator[bool]:
        yield False
        while True:
            yield True

    over = once()
    server = Server([run], hosts=("127.0.0.1",), is_over=lambda: next(over))
    answer = TestClient(server.app, base_url=SITE).get("/api/stream", headers={"last-event-id": "0.0.1"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    kinds = [json.loads(line.removeprefix("data: "))["kind"] for line in answer.text.splitlines() if "data" in line]
    assert kinds == ["metrics", "events"]  # the records it has


def test_what_keeps_records_from_being_read_is_said_until_it_is_over(
    run: WatchedRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(most: int) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(run.index, "update", no_space)
        assert run.follow() is False
        assert client.get("/api/runs/0/steps").json()["problem"] == "new records are not read: database or disk is full"
    run.follow()
    assert client.get("/api/runs/0/steps").json()["problem"] is None


def test_nothing_in_the_runs_directory_is_changed(run: WatchedRun, client: TestClient) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    for path in ("overview", "extra", "steps", "responses?search=first"):
        assert client.get(f"/api/runs/0/{path}").status_code == 200
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
