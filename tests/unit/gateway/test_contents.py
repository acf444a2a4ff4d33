"""Contents of messages in each API: text and items under their own names, and where what cannot be taken is."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.media import Media
from nemorl_agents.gateway.apis.contents import content_of, plain_text
from nemorl_agents.gateway.errors import RequestError

GIF, WAV = Media("image", b"GIF89a"), Media("audio", b"RIFF")
GIF_URL, WAV_URL = "data:image/gif;base64,R0lGODlh", "data:audio/wav;base64,UklGRg=="
SOURCE = {"type": "base64", "media_type": "image/gif", "data": "R0lGODlh"}


@pytest.mark.parametrize(
    ("part", "item"),
    [
        ({"type": "image_url", "image_url": {"url": GIF_URL, "detail": "low"}}, GIF),
        ({"type": "audio_url", "audio_url": {"url": WAV_URL}}, WAV),
        ({"type": "input_image", "image_url": GIF_URL, "detail": "auto", "file_id": None}, GIF),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, WAV),
        ({"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}, GIF),
        ({"type": "image", "source": {"type": "url", "url": GIF_URL}}, GIF),
    ],
)
def test_an_item_is_read_under_the_name_of_each_api(part: Any, item: Media) -> None:
    told = {"type": "text", "text": "what?"}
    assert content_of([told, part], "content") == [told, {"type": item.kind, item.kind: item}]


def test_text_alone_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    assert content_of(parts, "content") == plain_text(parts, "content") == "a\nb\nc"
    assert content_of("a", "content") == "a"
    assert content_of([], "content") == ""


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "image_url", "image_url": GIF_URL}, "image_url"),
        ({"type": "image_url", "image_url": {"url": 1}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.gif"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": WAV_URL}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:text/plain;base64,aGk="}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:image/gif;base64,R"}}, "image_url.url"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        ({"type": "input_image"}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg=="}}, "input_audio.format"),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "pdf"}}, "input_audio.format"),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, "input_audio.data"),
        ({"type": "image", "source": {**SOURCE, "media_type": "application/pdf"}}, "source.media_type"),
        ({"type": "image", "source": {**SOURCE, "data": None}}, "source.data"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.type"),
        ({"type": "image", "image": GIF_URL}, "source"),
        ({"type": "video_url", "video_url": {"url": GIF_URL}}, "type"),
        ({"type": ["image_url"]}, "type"),
        ({}, "type"),
    ],
)
def test_what_cannot_be_taken_is_named_to_the_place(part: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        content_of([part], "content")
    assert (caught.value.status, caught.value.param) == (400, f"content[0].{place}")


def test_where_text_alone_may_stand_an_item_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        plain_text([{"type": "image_url", "image_url": {"url": GIF_URL}}], "content")
    assert caught.value.param == "content[0].type"
