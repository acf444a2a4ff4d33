"""What `nemorl plugins search` finds and says, and the table of an index."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from command_line import Command, Done
from hand_made_indexes import Content, Publisher, content, listing
from markdown_it import MarkdownIt
from nemorl.base.packages.plugin_policy import machine_policy
from nemorl_cli.directory.listing import Listing, Release
from nemorl_cli.directory.publishing import table

ROOT = Path(__file__).parents[3]
Search = Callable[..., Done]


@pytest.fixture
def search(nemorl: Command, publisher: Publisher, tmp_path: Path) -> Search:
    """Searches an index of some plugins besides nemorl's own."""

    def run(*words: str, plugins: tuple[Content, ...] = ()) -> Done:
        (tmp_path / "index.json").write_bytes(publisher.signed(content(*plugins)))
        index = ("--index", tmp_path / "index.json", "--key", publisher.public)
        return nemorl("plugins", "search", *words, *index)

    return run


def test_the_index_of_this_repository_and_its_page_are_current() -> None:
    spec = spec_from_file_location("generate_directory", ROOT / "docs" / "generate_directory.py")
    assert spec is not None
    assert spec.loader is not None
    generator = module_from_spec(spec)
    spec.loader.exec_module(generator)
    for path, text in generator.texts().items():
        assert path.read_text("utf-8") == text, "run python docs/generate_directory.py"


def test_a_part_is_found_by_its_name_and_one_with_the_word_in_its_name_comes_first(nemorl: Command) -> None:
    found = nemorl("plugins", "search", "Dr-GRPO", "--json").json["plugins"]
    assert [(each["name"], each["matches"]) for each in found] == [("nemorl-grpo", ["algorithms:dr_grpo"])]
    names = [each["name"] for each in nemorl("plugins", "search", "vllm", "--json").json["plugins"]]
    assert names[0] == "nemorl-vllm"


def test_each_word_must_occur_and_the_kind_must_be_offered(nemorl: Command) -> None:
    def names(*asked: str) -> list[str]:
        return [each["name"] for each in nemorl("plugins", "search", *asked, "--json").json["plugins"]]

    assert "nemorl-megatron" in names("megatron", "--kind", "training-backend")
    assert names("megatron", "--kind", "logger") == []
    assert names("megatron", "nosuchword") == []
    assert len(names()) > 10


@pytest.mark.parametrize(("slip", "meant"), [("megatorn", "megatron"), ("nemorl-inisght", "nemorl-insight")])
def test_a_slip_gets_what_was_probably_meant(slip: str, meant: str, nemorl: Command) -> None:
    done = nemorl("plugins", "search", slip)
    assert (done.code, done.out) == (1, "")
    assert repr(meant) in done.err


def test_what_is_not_installed_says_how_to_get_it(search: Search) -> None:
    done = search("essays", plugins=(listing(licence="MIT", homepage="https://acme.org/grader"),))
    assert done.code == 0
    assert done.out.splitlines() == [
        "acme-grader 1.0: Graders of essays, from the index acme of 2026-11-18",
        "  environment: acme_grader",
        "  MIT, https://acme.org/grader",
        "  nemorl plugins install acme-grader==1.0",
    ]


def test_what_is_installed_says_so(nemorl: Command) -> None:
    (found,) = (e for e in nemorl("plugins", "search", "sapo", "--json").json["plugins"] if e["name"] == "nemorl-grpo")
    assert found["installed"] == "0.1.0"
    assert found["problems"] == []


def test_the_newest_version_that_works_here_is_proposed(search: Search) -> None:
    versions = [
        {"version": "3.0", "nemorl": ">=99"},
        {"version": "2.0", "python": ">=4"},
        {"version": "1.10", "nemorl": ">=0.1,<0.2"},
        {"version": "1.9"},
        {"version": "1.11rc1"},
    ]
    assert "acme-grader==1.10" in search("acme", plugins=(listing(versions=versions),)).out


def test_what_works_nowhere_here_says_why() -> None:
    release = Release(version="3.0", nemorl=">=99", python=">=4")
    assert release.problems_with(nemorl="0.1.0", python="3.11.7") == [
        "needs nemorl >=99, and this is 0.1.0",
        "needs Python >=4, and this is 3.11.7",
    ]


def test_what_a_policy_blocks_is_not_proposed(search: Search, tmp_path: Path) -> None:
    settings = tmp_path / "xdg_config_home" / "nemorl" / "config.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text("plugins: {block: [Acme_Grader]}")
    machine_policy.cache_clear()
    done = search("acme")
    assert "not here: blocked: plugins.block" in done.out
    assert "plugins install" not in done.out


def test_another_index_takes_no_name_from_nemorls_own(search: Search) -> None:
    done = search("nemorl-grpo", plugins=(listing("nemorl-grpo", versions=[{"version": "9.0"}]),))
    heads = re.findall(r"^nemorl-grpo (\S+):.*", done.out, re.MULTILINE)
    assert heads == ["0.1.0", "9.0"]
    assert "from the index acme of 2026-11-18" in done.out


def test_a_file_called_nemorl_is_not_taken_for_nemorls_own(
    nemorl: Command, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nemorl").write_bytes(publisher.signed(content(name="nemorl")))
    done = nemorl("plugins", "search", "essays", "--index", "nemorl", "--key", publisher.public)
    assert done.out.startswith("acme-grader 1.0: Graders of essays, from the index nemorl of 2026-11-18")


def test_the_verdict_of_the_kit_is_shown_with_what_it_is_worth(search: Search) -> None:
    seen = {
        "date": "2026-11-20",
        "kit": "0.1.0",
        "nemorl": "0.1.0",
        "python": "3.12",
        "level": "quick",
        "device": "cpu",
        "verdict": "passed",  # which is not believed: it follows from the parts
        "parts": {"environments:a": {"passed": 3, "skipped": {"x": "why"}}, "environments:b": {"passed": 0}},
    }
    done = search("acme", plugins=(listing(versions=[{"version": "1.0", "conformance": seen}]),))
    said = (
        "conformance partial (quick: 3 passed, 1 skipped, 1 of 2 parts not tried; kit 0.1.0, nemorl 0.1.0, 2026-11-20)"
    )
    assert said in done.out


HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=y> [a](javascript:b) ![c](d) `e` | "
    "**f** &lt; https://g.h | <!-- --> \\"
)


def test_markup_in_a_summary_is_text_on_the_page() -> None:
    page = table([Listing.model_validate(listing(summary=HOSTILE, licence="<b>x</b>"))])
    assert len(page.splitlines()) == 3
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    shown = reader.render(page)
    assert not re.search(r"<(script|img|a|b|strong|em)\b", shown)
    tokens = [child for token in reader.parse(page) for child in token.children or ()]
    assert {token.type for token in tokens} <= {"text", "code_inline", "text_special"}
    (row,) = re.findall(r"<tr>\n((?:<td>.*</td>\n)+)</tr>", shown)
    assert row.count("<td>") == 6
    cells = ["".join(c.content for c in token.children or ()) for token in reader.parse(page) if token.type == "inline"]
    assert cells[7] == f"{HOSTILE} (<b>x</b>)"


def test_a_homepage_is_a_link(tmp_path: Path) -> None:
    page = table([Listing.model_validate(listing("acme_x", homepage="https://acme.org/a_b"))])
    assert '<a href="https://acme.org/a_b">acme_x</a>' in MarkdownIt("commonmark").enable("table").render(page)


def test_help_shows_examples(nemorl: Command) -> None:
    assert "nemorl plugins search sandbox --kind environment" in nemorl("plugins", "search", "--help").out
    assert "nemorl plugins index plugins/ --output index.json" in nemorl("plugins", "index", "--help").out
