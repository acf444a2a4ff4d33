"""From what `nemorl plugins check` saw to a listing, a badge and a signed index of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import Command
from hand_made_indexes import listing
from installed_plugins import GOOD, Install, write_distribution
from nemorl.errors import UsageError
from nemorl.plugins import Index, PluginEntry
from nemorl_cli.directory.badges import COLOURS, merged, write_badges
from nemorl_cli.directory.indexes import IndexSource, read_index
from nemorl_cli.directory.listing import Listing
from nemorl_cli.directory.publishing import read_listings, write_index
from nemorl_testing.scaffold.names import Names
from nemorl_testing.scaffold.writing import package_texts
from nemorl_trust.signed_json import make_key
from recorded_messages import Raises

NAME = "acme-env"
BUILDS = """
        def build(self):
            from nemorl import RewardFunction

            return RewardFunction(lambda prompt, response: 1.0)
"""
RAISES = GOOD + "\n    raise RuntimeError('out of order')\n"


def result(passed: int = 0, problems: Sequence[str] = (), **others: Any) -> dict[str, Any]:
    said = [{"what": what, "fix": ""} for what in problems]
    names = [str(number) for number in range(passed)]
    return {"passed": names, "skipped": {}, "notes": [], "problems": said, **others}


@pytest.fixture
def entries(install: Install) -> list[PluginEntry]:
    """Two parts of one distribution, version 1.2."""
    install(NAME, {"one": "acme_env:Env", "two": "acme_env:Env"}, requires=("nemorl-core>=0.1,<0.2",))
    return [entry for entry in Index.installed().entries if entry.distribution == NAME]


def written(entries: list[PluginEntry], folder: Path, *results: dict[str, Any], full: bool = True) -> tuple[Any, str]:
    """The listing and the badge."""
    folder.mkdir()
    file, badge = write_badges(results, entries, folder, full=full, device="cpu")
    assert (file.name, badge.name) == ("acme-env.json", "acme-env-1.2.svg")
    return json.loads(file.read_text()), badge.read_text()


@pytest.mark.parametrize(
    ("results", "full", "verdict", "colour", "said"),
    [
        ((result(3), result(4)), True, "passed", "passed", "1.2 full: 7 passed"),
        ((result(3), result(4)), False, "passed", "quick", "1.2 quick: 7 passed"),
        ((result(3, skipped={"x": "why"}), result(4)), True, "passed", "passed", "1.2 full: 7 passed, 1 skipped"),
        ((result(3), result()), True, "partial", "partial", "1.2 full: 3 passed, 1 of 2 parts not tried"),
        ((result(3), result(4, ["it broke"])), True, "failed", "failed", "1.2 full: 1 failed, 7 passed"),
        ((result(), result()), True, "partial", "partial", "1.2 full: 0 passed, 2 of 2 parts not tried"),
    ],
)
def test_badge_and_listing_say_what_was_seen(
    entries: list[PluginEntry],
    tmp_path: Path,
    results: tuple[dict[str, Any], ...],
    full: bool,
    verdict: str,
    colour: str,
    said: str,
) -> None:
    listed, badge = written(entries, tmp_path / "out", *results, full=full)
    (release,) = listed["versions"]
    assert release["conformance"]["verdict"] == verdict
    assert release["nemorl"] == ">=0.1,<0.2"
    assert listed["parts"] == {"environments": {"one": "made up", "two": "made up"}}
    drawn = ElementTree.fromstring(badge)
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["nemorl conformance", said]
    assert {rect.get("fill") for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")} == {"#555", COLOURS[colour]}
    assert not re.search(r"href|<script|<image|url\(", badge)


def test_what_a_plugin_says_of_its_failure_is_one_harmless_line(entries: list[PluginEntry], tmp_path: Path) -> None:
    broken = result(0, ["first\x1b[2J\nsecond <b>" + "x" * 9999])
    listed, badge = written(entries, tmp_path / "out", broken, result(1))
    (failed,) = listed["versions"][0]["conformance"]["parts"]["environments:one"]["failed"]
    assert failed.startswith("first\\x1b[2J second <b>xxx")
    assert len(failed) == 500
    assert "<b>" not in badge


def test_other_versions_stay_listed_and_the_newest_says_what_it_is() -> None:
    old = Listing.model_validate(listing(versions=[{"version": "1.10"}, {"version": "1.9"}], summary="old"))
    new = Listing.model_validate(listing(versions=[{"version": "1.9", "nemorl": ">=0.1"}], summary="of 1.9"))
    both = merged(new, old)
    assert [(r.version, r.nemorl) for r in both.versions] == [("1.10", None), ("1.9", ">=0.1")]
    assert both.summary == "old"
    newest = Listing.model_validate(listing(versions=[{"version": "1.11"}], summary="new"))
    assert merged(newest, both).summary == "new"


def test_the_wheel_is_noted_where_pip_knows_it(entries: list[PluginEntry], site: Path, tmp_path: Path) -> None:
    url = {"url": "file:///x.whl", "archive_info": {"hashes": {"sha256": "ab" * 32}}}
    (site / "acme_env-1.2.dist-info" / "direct_url.json").write_text(json.dumps(url))
    listed, _ = written(entries, tmp_path / "out", result(1), result(1))
    assert listed["versions"][0]["sha256"] == "ab" * 32


def test_a_distribution_whose_name_is_a_path_is_written_nowhere(site: Path, tmp_path: Path, raises: Raises) -> None:
    write_distribution(site, "acme-evil", {"evil": "acme_evil:Env"})
    metadata = site / "acme_evil-1.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Name: acme-evil", "Name: ../../acme-evil"))
    entries = [entry for entry in Index.installed().entries if entry.name == "evil"]
    before = set(tmp_path.rglob("*"))
    with raises(UsageError, "../../acme-evil"):
        write_badges([result(1)], entries, tmp_path / "out", full=False, device="cpu")
    assert set(tmp_path.rglob("*")) == before


def test_check_writes_a_red_badge_for_what_fails_and_no_green_one_for_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nemorl: Command
) -> None:
    write_distribution(tmp_path / "site", "acme-bad", {"bad_env": "acme_bad:Env"}, code=RAISES)
    write_distribution(tmp_path / "site", "acme-good", {"good_env": "acme_good:Env"}, code=GOOD + BUILDS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    from nemorl.plugins import Registry
    from nemorl_testing.plugin import use_registry

    with use_registry(Registry(Index.installed())):
        done = nemorl("plugins", "check", "bad_env", "good_env", "--badge", tmp_path / "out", "--json")
        refused = nemorl("plugins", "check", "--kind", "environments", "--badge", tmp_path / "out")
    assert (done.code, [each["ok"] for each in done.json]) == (1, [False, True])
    bad = (tmp_path / "out" / "acme-bad-1.2.svg").read_text()
    assert COLOURS["failed"] in bad
    assert COLOURS["quick"] not in bad
    assert COLOURS["quick"] in (tmp_path / "out" / "acme-good-1.2.svg").read_text()
    listed = Listing.model_validate_json((tmp_path / "out" / "acme-bad.json").read_text())
    seen = listed.versions[0].conformance
    assert seen is not None
    assert (seen.verdict, seen.level) == ("failed", "quick")
    assert "RuntimeError" in seen.parts["environments:bad_env"].failed[0]
    assert refused.code == 2
    assert "--kind" in refused.err


# The repository of an index


def write(folder: Path, name: str, **others: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(listing(name, **others)))
    return folder


def test_an_index_that_was_written_is_believed_and_the_next_one_is_newer(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    listings = read_listings([write(tmp_path / "plugins", "acme-a"), write(tmp_path / "more", "acme-b")])
    first = write_index(listings, tmp_path / "index.json", tmp_path / "key", "acme")
    source = IndexSource(str(tmp_path / "index.json"), tmp_path / "key.pub")
    assert read_index(source).index == first
    second = write_index(listings[:1], tmp_path / "index.json", tmp_path / "key", None)
    assert (second.name, second.serial) == ("acme", max(second.serial, first.serial + 1))
    assert read_index(source).index == second


def test_an_index_of_another_key_is_not_replaced(tmp_path: Path, raises: Raises) -> None:
    listings = read_listings([write(tmp_path / "plugins", "acme-a")])
    for name in ("key", "other"):
        make_key(tmp_path / name)
    write_index(listings, tmp_path / "index.json", tmp_path / "key", "acme")
    before = (tmp_path / "index.json").read_bytes()
    with raises(UsageError, tmp_path / "index.json"):
        write_index(listings, tmp_path / "index.json", tmp_path / "other", "acme")
    assert (tmp_path / "index.json").read_bytes() == before


def test_a_listing_in_a_file_of_another_name_is_refused(tmp_path: Path, raises: Raises) -> None:
    folder = write(tmp_path / "plugins", "acme-a")
    (folder / "acme-a.json").rename(folder / "acme-b.json")
    with raises(UsageError, "acme-a", "acme-a.json"):
        read_listings([folder])


def test_two_folders_may_not_list_one_plugin(tmp_path: Path, raises: Raises) -> None:
    folders = [write(tmp_path / name, "acme-a") for name in ("one", "two")]
    with raises(UsageError, folders[0] / "acme-a.json", folders[1] / "acme-a.json"):
        read_listings(folders)


@pytest.mark.parametrize("text", ["", "[]", '{"name": "acme-a"}', '{"name": "a", "name": "b"}', "{" * 9999])
def test_a_file_that_is_no_listing_is_named(text: str, tmp_path: Path, raises: Raises) -> None:
    (tmp_path / "acme-a.json").write_text(text)
    with raises(UsageError, tmp_path / "acme-a.json"):
        read_listings([tmp_path])


def test_the_command_signs_nothing_without_a_key(tmp_path: Path, nemorl: Command) -> None:
    folder = write(tmp_path / "plugins", "acme-a", summary="<script>")
    assert nemorl("plugins", "index", folder).code == 0
    refused = nemorl("plugins", "index", folder, "--output", tmp_path / "index.json", "--name", "acme")
    assert refused.code == 2
    assert "--key" in refused.err
    assert not (tmp_path / "index.json").exists()
    make_key(tmp_path / "key")
    nameless = nemorl("plugins", "index", folder, "--output", tmp_path / "index.json", "--key", tmp_path / "key")
    assert nameless.code == 2
    assert "--name" in nameless.err
    assert nemorl("plugins", "index", folder, "--page", tmp_path / "page.md").code == 0
    assert "<script>" not in (tmp_path / "page.md").read_text()


def test_a_new_package_brings_the_pull_request_that_lists_it() -> None:
    text = package_texts(Names.of("environment", "word-count"))[".github/publish.md"]
    assert "nemorl plugins check nemorl-word-count --full --badge INDEX/plugins" in text
    assert "plugins/nemorl-word-count.json" in text
    assert "example" not in text
