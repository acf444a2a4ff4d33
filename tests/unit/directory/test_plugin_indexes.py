"""Which indexes are believed: signed by their key, not older than before, and holding nothing that could act."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from hand_made_indexes import Content, Publisher, content, listing
from nemorl.base.packages.plugin_policy import machine_policy
from nemorl.errors import UsageError
from nemorl_cli.directory.indexes import IndexSource, ReadIndex, read_index, sources
from recorded_messages import Raises

Read = Callable[..., ReadIndex]
NEVER = 4_000_000_000
"""A second of the year 2096."""


@pytest.fixture
def read(tmp_path: Path, publisher: Publisher) -> Read:
    """Reads a text, or a content that its publisher signs, from one and the same file."""

    def of(given: bytes | Content) -> ReadIndex:
        file = tmp_path / "index.json"
        file.write_bytes(given if isinstance(given, bytes) else publisher.signed(given))
        return read_index(IndexSource(str(file), publisher.public))

    return of


def test_an_index_that_its_key_signed_is_read(read: Read) -> None:
    found = read(content(listing(field_of_a_later_nemorl=[1])))
    assert found.index is not None
    assert [each.name for each in found.index.plugins] == ["acme-grader"]
    assert (found.index.date, found.note) == ("2026-11-18", "")


def changed(signed: bytes) -> bytes:
    return signed.replace(b"Graders of essays", b"Graders of EVERYTHING")


def as_an_index(signed_set: bytes) -> bytes:
    return signed_set.replace(b"nemorl plugin set 1", b"nemorl plugin index 1").replace(b'"plugins"', b'"index"', 1)


@pytest.mark.parametrize(
    ("spoil", "fact"),
    [
        (lambda publisher, folder: changed(publisher.signed(content())), "changed"),
        (lambda publisher, folder: Publisher(folder / "other").signed(content()), "key"),
        (lambda publisher, folder: json.dumps({"format": "nemorl plugin index 1", "index": content()}), "signed"),
        (lambda publisher, folder: publisher.signed(content(), "nemorl plugin set 1", "plugins"), "format"),
        (lambda publisher, folder: publisher.signed(content(), "nemorl plugin index 2"), "format"),
        (lambda publisher, folder: as_an_index(publisher.signed(content(), "nemorl plugin set 1", "plugins")), "key"),
        (lambda publisher, folder: '{"format": "nemorl plugin index 1", "index": {}, "index": {}}', "index"),
        (lambda publisher, folder: "[" * 200_000, "nested"),
        (lambda publisher, folder: '{"serial": ' + "9" * 50_000 + "}", "digits"),
        (lambda publisher, folder: b"\xff\xfe\0", "UTF-8"),
        (lambda publisher, folder: "", "JSON"),
    ],
    ids=[
        "changed",
        "another-key",
        "unsigned",
        "a-set",
        "later-format",
        "set-as-index",
        "twice",
        "deep",
        "digits",
        "bytes",
        "empty",
    ],
)
def test_what_its_key_did_not_sign_is_refused(
    spoil: Callable[[Publisher, Path], bytes | str],
    fact: str,
    read: Read,
    publisher: Publisher,
    tmp_path: Path,
    raises: Raises,
) -> None:
    (tmp_path / "other").mkdir()
    text = spoil(publisher, tmp_path)
    with raises(UsageError) as caught:
        read(text if isinstance(text, bytes) else text.encode())
    said = str(caught.value)
    assert "index.json" in said
    assert fact in said or fact == "JSON"
    assert getattr(caught.value, "fix", None)


@pytest.mark.parametrize(
    "hostile",
    [
        listing("../../etc/passwd"),
        listing("--index-url=http://evil"),
        listing("a/b"),
        listing("a" * 101),
        listing("acme-grader\n"),
        listing(summary="fine\x1b[2J\x1b]0;owned\x07"),
        listing(summary="right \u202e to left"),
        listing(summary="two\nlines"),
        listing(summary="x" * 301),
        listing(licence="\x9b31m"),
        listing(parts={"environments": {"../x": ""}}),
        listing(parts={"environments": {"x": "\x1b[31m"}}),
        listing(parts={"../environments": {"x": ""}}),
        listing(homepage="javascript:alert(1)"),
        listing(homepage='https://x" onload="alert(1)'),
        listing(homepage="https://x/)[y](javascript:alert(1)"),
        listing(versions=[]),
        listing(versions=[{"version": "../1.0"}]),
        listing(versions=[{"version": "1.0"}, {"version": "1.0.0", "x": 1}, {"version": "1.0"}]),
        listing(versions=[{"version": "1.0", "nemorl": "whatever"}]),
        listing(versions=[{"version": "1.0", "sha256": "abc"}]),
    ],
    ids=lambda each: json.dumps(each)[:60],
)
def test_what_no_listing_may_hold_is_refused_though_it_is_signed(hostile: Content, read: Read, raises: Raises) -> None:
    with raises(UsageError, "plugins.0") as caught:
        read(content(hostile))
    assert str(caught.value).isprintable() or "\n" in str(caught.value)


def test_a_distribution_that_is_listed_twice_is_refused_however_it_is_written(read: Read, raises: Raises) -> None:
    with raises(UsageError, "acme-grader", "twice"):
        read(content(listing("Acme_Grader"), listing("acme-grader")))


def test_an_older_index_is_refused_where_a_newer_one_was_read(read: Read, raises: Raises) -> None:
    read(content(serial=1_795_000_010))
    with raises(UsageError, 1_795_000_009, 1_795_000_010):
        read(content(serial=1_795_000_009))
    found = read(content(serial=1_795_000_010))  # the same again is no news
    assert found.index is not None
    assert found.index.serial == 1_795_000_010


def test_two_indexes_of_one_serial_are_not_believed(read: Read, raises: Raises) -> None:
    read(content())
    with raises(UsageError, "same", "second"):
        read(content(listing("acme-other")))


def test_an_index_does_not_become_another_one_of_the_same_key(read: Read, raises: Raises) -> None:
    read(content(name="acme"))
    with raises(UsageError, "'acme'", "'other'"):
        read(content(name="other", serial=1_795_000_500))


def test_an_index_of_the_future_would_make_all_others_look_old(read: Read, raises: Raises) -> None:
    with raises(UsageError, "2096-10-02"):
        read(content(serial=NEVER))
    assert read(content()).index is not None


def test_a_new_key_begins_anew(tmp_path: Path, read: Read) -> None:
    read(content(serial=1_795_000_010))
    (tmp_path / "new").mkdir()
    successor = Publisher(tmp_path / "new")
    (tmp_path / "index.json").write_bytes(successor.signed(content(serial=1_795_000_000)))
    assert read_index(IndexSource(str(tmp_path / "index.json"), successor.public)).index is not None


def test_a_hundred_megabytes_are_not_read(tmp_path: Path, publisher: Publisher, raises: Raises) -> None:
    with (tmp_path / "index.json").open("wb") as file:
        file.truncate(100 << 20)
    tracemalloc.start()
    try:
        with raises(UsageError, "16,777,216"):
            read_index(IndexSource(str(tmp_path / "index.json"), publisher.public))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20


# From a server: Python's own, which knows nothing of indexes


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            """Tests are quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/index.json"
        finally:
            server.shutdown()
            thread.join()


def giving(text: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)

    return answer


def test_an_index_is_read_from_a_server_and_without_it_from_the_copy(publisher: Publisher, raises: Raises) -> None:
    with served(giving(publisher.signed(content()))) as url:
        assert read_index(IndexSource(url, publisher.public)).note == ""
    found = read_index(IndexSource(url, publisher.public))
    assert found.index is not None
    assert found.index.plugins[0].name == "acme-grader"
    assert "copy of 2026-11-18" in found.note
    with raises(UsageError, f"{url}x"):  # which was never read
        read_index(IndexSource(f"{url}x", publisher.public))


def test_a_copy_that_somebody_changed_is_not_used(tmp_path: Path, publisher: Publisher, raises: Raises) -> None:
    with served(giving(publisher.signed(content()))) as url:
        read_index(IndexSource(url, publisher.public))
    (kept,) = (tmp_path / "xdg_state_home").rglob("*.json")
    kept.write_bytes(changed(kept.read_bytes()))
    with raises(UsageError, url):
        read_index(IndexSource(url, publisher.public))


def test_a_server_that_never_ends_is_left(publisher: Publisher, raises: Raises) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while True:
                request.wfile.write(b"x" * (1 << 20))
        except OSError:
            return

    with served(endless) as url, raises(UsageError, "16,777,216"):
        read_index(IndexSource(url, publisher.public))


def test_an_answer_byte_by_byte_is_waited_for_so_long_and_no_longer(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr("nemorl_cli.directory.indexes.TIMEOUT_S", 0.3)

    def slow(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            for _ in range(100):
                request.wfile.write(b"x")
                threading.Event().wait(0.05)
        except OSError:
            return

    with served(slow) as url, raises(UsageError, "within"):
        read_index(IndexSource(url, publisher.public))


def test_a_redirect_is_not_followed(publisher: Publisher, raises: Raises) -> None:
    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", "http://169.254.169.254/latest/meta-data")
        request.end_headers()

    with served(elsewhere) as url, raises(UsageError, 302, "169.254.169.254"):
        read_index(IndexSource(url, publisher.public))


@pytest.mark.parametrize(
    "location", ["http://plugins.example.org/i.json", "ftp://x/i.json", "file:///etc/passwd", "HTTP://10.0.0.1/i"]
)
def test_nothing_is_read_over_other_ways_than_https(location: str, publisher: Publisher, raises: Raises) -> None:
    with raises(UsageError, location, "https"):
        read_index(IndexSource(location, publisher.public))


# Who names them


def test_indexes_are_named_by_settings_variables_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "xdg_config_home" / "nemorl" / "config.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("plugins: {block: [acme-x], indexes: [{location: https://a/i.json, key: a.pub}]}")
    monkeypatch.setenv("NEMORL_PLUGIN_INDEX", "/srv/b.json")
    monkeypatch.setenv("NEMORL_PLUGIN_INDEX_KEY", "/srv/b.pub")
    assert [*sources("c.json", Path("c.pub"))] == [
        IndexSource("https://a/i.json", settings.parent / "a.pub"),
        IndexSource("/srv/b.json", Path("/srv/b.pub")),
        IndexSource("c.json", Path("c.pub")),
    ]
    assert machine_policy().refusal("acme-x") is not None
    assert machine_policy().refusal("acme-y") is None


@pytest.mark.parametrize("wrong", ["[{location: x}]", "[x]", "7", "{location: x}"])
def test_settings_that_name_no_key_are_refused(wrong: str, tmp_path: Path, raises: Raises) -> None:
    settings = tmp_path / "xdg_config_home" / "nemorl" / "config.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"plugins: {{indexes: {wrong}}}")
    with raises(UsageError, "plugins.indexes", settings):
        list(sources(None, None))


def test_an_index_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    with raises(UsageError, "i.json", "--key"):
        list(sources("i.json", None))
    with raises(UsageError, "i.pub", "--index"):
        list(sources(None, Path("i.pub")))
    monkeypatch.setenv("NEMORL_PLUGIN_INDEX", "j.json")
    with raises(UsageError, "j.json"):
        list(sources(None, None))


def test_one_that_is_refused_does_not_hide_the_rest(nemorl: Command, publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(changed(publisher.signed(content())))
    asked = ("plugins", "search", "sapo", "--index", tmp_path / "index.json", "--key", publisher.public)
    done = nemorl(*asked)
    assert done.code == 2
    assert "nemorl-grpo" in done.out
    assert done.err.startswith("refused: ")
    assert "fix: " in done.err
    (own, refused) = nemorl(*asked, "--json").json["indexes"]
    assert own["refused"] is None
    assert "changed" in refused["refused"]["what"]
