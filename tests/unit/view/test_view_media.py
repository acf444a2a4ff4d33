"""Images and sounds on the page: what the server gives out, what a page without one holds."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from nemorl.media import Media
from nemorl_cli.report.records.evaluating import EvaluationRecords
from nemorl_cli.report.report import write_report
from nemorl_cli.report.viewing import thumbnails
from nemorl_insight.view.server import Server
from nemorl_insight.view.watched import WatchedRun
from PIL import Image
from seen_records import decode, episode, picture, tone
from starlette.testclient import TestClient

LARGE, SMALL, TONE = picture(1, 700, 420), picture(2), tone()
DAMAGED = Media("image", b"\x89PNG and then nothing")


def recorded(folder: Path) -> Path:
    records = EvaluationRecords(folder, decode)
    shown = ["see ", (LARGE, 6), "and ", (TONE, 3), "now ", (DAMAGED, 1)]
    records.add("drawings", 0, [episode(shown, "2", ["more ", (SMALL, 4)])])  # type: ignore[list-item]
    records.flush()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    found = WatchedRun(recorded(tmp_path / "run"), tmp_path / "cache")
    found.follow()
    return found


@pytest.fixture
def client(run: WatchedRun) -> TestClient:
    return TestClient(Server([run], hosts=["127.0.0.1"]).app, base_url="http://127.0.0.1:8000")


def media(client: TestClient, item: Media, query: str = "") -> Any:
    return client.get(f"/api/runs/0/media/{item.digest}{query}")


def test_items_stand_where_the_text_shows_them(client: TestClient) -> None:
    [row] = client.get("/api/runs/0/responses").json()["rows"]
    assert [item["digest"] for item in row["media"]] == [LARGE.digest, TONE.digest, DAMAGED.digest]  # of the prompt
    whole = client.get("/api/runs/0/response", params={"id": row["sample_id"], "split": "evaluation", "step": 0}).json()
    assert [turn.get("pieces") for turn in whole["turns"]] == [
        ["see ", 0, "and ", 1, "now ", 2, ""],
        None,
        ["more ", 3, ""],
        None,
    ]
    assert [item["size"] for item in whole["media"]] == ["700x420", "0.5 s", "", "90x60"]


def test_files_are_served_as_they_are_and_images_small_too(client: TestClient) -> None:
    image, sound, small = media(client, LARGE), media(client, TONE), media(client, LARGE, "?small=1")
    assert (image.content, image.headers["content-type"]) == (LARGE.data, "image/png")
    assert (sound.content, sound.headers["content-type"]) == (TONE.data, "audio/wav")
    assert image.headers["x-content-type-options"] == "nosniff"
    assert Image.open(io.BytesIO(small.content)).size == (256, 154)  # 420 * 256 / 700 = 153.6
    assert small.headers["content-type"] in ("image/png", "image/jpeg")


def test_a_thumbnail_is_made_once_and_outside_of_the_run(
    client: TestClient, run: WatchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(run.path.rglob("*"))
    first = media(client, LARGE, "?small=1").content
    monkeypatch.setattr(thumbnails, "thumbnail", lambda data: pytest.fail("made again"))
    assert media(client, LARGE, "?small=1").content == first
    assert set(run.path.rglob("*")) == before


@pytest.mark.parametrize("name", ["..%2f..%2fconfig.yaml", "0" * 64, "%00", "a" * 300])
def test_what_records_do_not_show_is_not_served(name: str, client: TestClient) -> None:
    for query in ("", "?small=1"):
        assert client.get(f"/api/runs/0/media/{name}{query}").status_code == 404


def test_an_image_that_cannot_be_decoded_has_no_thumbnail(client: TestClient) -> None:
    assert media(client, DAMAGED, "?small=1").status_code == 404
    assert media(client, DAMAGED).status_code == 200


def test_a_page_without_a_server_holds_small_images_and_links_the_files_beside_it(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    page = write_report(run).read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    found = data["runs"][0]["media"]
    assert found[LARGE.digest]["small"].startswith("data:image/")
    assert found[TONE.digest]["small"].startswith("data:audio/wav;base64,")
    assert found[DAMAGED.digest]["small"] is None
    assert all((run / one["full"]).is_file() for one in found.values())
    assert "media-src data:" in page
    elsewhere = write_report(run, tmp_path / "other" / "report.html").read_text()
    assert LARGE.digest in elsewhere
    assert "records/media" not in elsewhere


def test_beyond_its_budget_a_page_names_items_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "run")
    monkeypatch.setattr(thumbnails, "MOST_BYTES", 1)
    found = thumbnails.inlined_media(run / "records", [LARGE.digest, SMALL.digest, LARGE.digest], None)
    assert list(found) == [LARGE.digest, SMALL.digest]
    assert found[LARGE.digest]["small"] is not None  # the first went beyond it
    assert found[SMALL.digest] == {"small": None, "full": None}
