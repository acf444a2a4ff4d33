"""The ``raises`` fixture: a test asserts the class of an error and its facts.

A fact is a name, a path or a number: what the message must carry however it is put. The messages that users see most
are compared word for word: those of the tests that ``golden/messages.txt`` names. ``pytest --write-messages [tests/…]``
writes their sections anew; review the file as the text it is. To add one, write the test's name there first. What
differs between machines is written as ``<tmp>``, ``<version>`` and the like.
"""

from __future__ import annotations

import difflib
import re
import socket
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden" / "messages.txt"
INDENT = "    "

COLLECTED = pytest.StashKey[set[str]]()
"""Names of all tests that were found, also of those that this run leaves out."""
WRITTEN = pytest.StashKey[dict[str, str]]()
"""With ``--write-messages``: what the tests of this run recorded."""


class Raises:
    """Like ``pytest.raises``, for errors of ours."""

    def __init__(self, places: Mapping[Path, str], golden: str | None) -> None:
        """
        Args:
            places: Folders of this machine, and what stands for them in the golden file.
            golden: What the golden file says for this test. None: nothing.
        """
        self._places = places
        self._golden = golden
        self._texts: list[str] = []

    @contextmanager
    def __call__(
        self,
        kind: type[BaseException] | tuple[type[BaseException], ...],
        *facts: object,
        path: str | list[str] | None = None,
        varies: str | None = None,
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        """
        Args:
            kind: The class, or several of which it may be one.
            facts: Names, paths and numbers that the message carries, each as a whole word.
            path: Where in the config the problem lies, of a ``ConfigError`` or a ``ValidationError``; all of them in
                their order if there are several.
            varies: A regular expression of what differs between machines: ``<...>`` is recorded in its place.
        """
        with pytest.raises(kind) as caught:
            yield caught
        text = str(caught.value)
        for fact in map(str, facts):
            assert re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text), f"{fact!r} is not in the message:\n{text}"
        if path is not None:
            assert paths(caught.value) == ([path] if isinstance(path, str) else path)
        normal = self._normal(f"{type(caught.value).__name__}: {words(caught.value)}", varies)
        if normal not in self._texts:
            self._texts.append(normal)

    @property
    def text(self) -> str:
        """What the test's errors said so far."""
        return "\n".join(self._texts).rstrip()

    def compare(self) -> None:
        """Fail the test if its errors said something else than the golden file."""
        if self._golden is None or self.text == self._golden:
            return
        lines = difflib.unified_diff(
            self._golden.splitlines(), self.text.splitlines(), GOLDEN.name, "this test", lineterm="", n=99
        )
        advice = "if the new words are right: pytest --write-messages FILE, and review the golden file"
        pytest.fail("\n".join([*lines, "", advice]), pytrace=False)

    def _normal(self, text: str, varies: str | None) -> str:
        if varies is not None:
            assert re.search(varies, text), f"nothing in the message is as {varies!r}:\n{text}"
            text = re.sub(varies, "<...>", text)
        for place, name in self._places.items():
            text = re.sub(rf"{re.escape(str(place))}(?![\w-])", name, text)
        for pattern, name in VARYING.items():
            text = re.sub(pattern, name, text)
        shown = (
            character if character.isprintable() or character == "\n" else repr(character)[1:-1] for character in text
        )
        return "\n".join(line.rstrip() for line in "".join(shown).splitlines())


VARYING = {
    rf"(<session>|{re.escape(tempfile.gettempdir())})/[\w-]+": "<tmp>",
    r"\((installed:|there are) [^)]*\)": r"(\1 <plugins>)",
    r"keys here: (\w+, ){9,}.*": "keys here: <keys>",
    r"(set `algorithm:` to one of) .*": r"\1 <algorithms>",
    r"\b\d+\.\d+\.\d+\.\d+(:\d+)?\b": "<address>",
    r"\b\d+\.\d+\.\d+([.+]?\w+)*": "<version>",
    r"\bpython\d\.\d+\b": "python<version>",
    r"\b0x[0-9a-f]{6,}\b": "<address>",
    r"\b(process|pid|kill) \d+": r"\1 <pid>",
    r"/proc/\d+/fd/\d+": "/proc/<pid>/fd/<number>",
    rf"\bon {re.escape(socket.gethostname())}(?!\w)": "on <host>",
    r"since \d+-\d+-\d+ [\d:]+: .*": "since <time>: <command>",
    r"(\.py\W* line) \d+": r"\1 <line>",
}


def words(error: BaseException) -> str:
    """The error's message; pydantic's without the links into its own documentation."""
    if isinstance(error, ValidationError):
        return "\n".join(f"{path}: {each['msg']}" for path, each in zip(paths(error), error.errors(), strict=True))
    return str(error)


def paths(error: BaseException) -> list[str]:
    """The places in a config that the error speaks of."""
    if isinstance(error, ValidationError):
        return [".".join(map(str, each["loc"])) for each in error.errors()]
    return [problem.path for problem in getattr(error, "problems", ())]


# The golden file: the name of a test, or of several that differ in their parameters only, and what the errors said.


def read_messages(text: str) -> dict[str, str]:
    """The messages of each test by its name."""
    messages: dict[str, str] = {}
    for section in re.split(r"\n\n(?=\S)", text):
        lines = section.splitlines()
        names = [line for line in lines if line and not line.startswith((INDENT, "#"))]
        said = "\n".join(line.removeprefix(INDENT) for line in lines if line not in names)
        messages |= dict.fromkeys(names, said.rstrip())
    return messages


def written_messages(messages: Mapping[str, str]) -> str:
    """What :func:`read_messages` reads."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, said in sorted(messages.items()):
        names.setdefault((name.partition("[")[0], said), []).append(name)
    sections = [
        "\n".join([*together, *(f"{INDENT}{line}".rstrip() for line in said.splitlines())])
        for (_, said), together in names.items()
    ]
    return "\n\n".join(
        ["# The errors that users see most. `pytest --write-messages` writes what they say.", *sections, ""]
    )


def forgotten(sections: Iterable[str], collected: set[str]) -> list[str]:
    """Sections of tests that are no more. Of a file of which nothing was collected there is nothing to say."""
    files = {name.partition("::")[0] for name in collected}

    def is_gone(name: str) -> bool:
        file = name.partition("::")[0]
        return not (TESTS / file).is_file() or (file in files and name not in collected)

    return [name for name in sections if is_gone(name)]


def name_of(item: pytest.Item) -> str:
    group = item.get_closest_marker("xdist_group")  # which xdist writes behind the name
    return item.nodeid.removeprefix(f"{TESTS.name}/").removesuffix(f"@{group.args[0]}" if group else "")


# The plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    told = f"record what errors say in tests/golden/{GOLDEN.name} instead of comparing with it"
    parser.addoption("--write-messages", action="store_true", help=told)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-messages"):
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--write-messages writes one file from one process: leave out -n")
        config.stash[WRITTEN] = {}


@pytest.hookimpl(tryfirst=True)  # before others deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):
        config.stash[COLLECTED] = {name_of(item) for item in items}


@pytest.fixture(scope="session")
def golden_messages() -> dict[str, str]:
    return read_messages(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture
def raises(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, golden_messages: dict[str, str]
) -> Raises:
    """Asserts an error's class and facts, and its words where the golden file has them."""
    places = {
        tmp_path_factory.getbasetemp(): "<session>",
        Path(sys.prefix): "<environment>",
        TESTS.parent: "<repository>",
    }
    return Raises(places, golden_messages.get(name_of(request.node)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield  # a test that fails ends here
    recorder = getattr(item, "funcargs", {}).get("raises")
    if isinstance(recorder, Raises):
        if WRITTEN in item.config.stash:
            item.config.stash[WRITTEN][name_of(item)] = recorder.text
        else:
            recorder.compare()


def pytest_sessionfinish(session: pytest.Session) -> None:
    written = session.config.stash.get(WRITTEN, None)
    if not written:
        return
    chosen = read_messages(GOLDEN.read_text(encoding="utf-8"))
    gone = forgotten(chosen, session.config.stash.get(COLLECTED, set()))
    sections = {name: written.get(name, text) for name, text in chosen.items() if name not in gone}
    GOLDEN.write_text(written_messages(sections), encoding="utf-8")
