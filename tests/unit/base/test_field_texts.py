"""What a config class says about its fields, beside pydantic's own reading of the same docstrings."""

from __future__ import annotations

import importlib
import linecache
from pathlib import Path

import pytest
from nemorl.base.text.field_texts import field_texts
from nemorl.config import Config
from pydantic import BaseModel, ConfigDict, Field


class Plain(BaseModel):
    """Read by pydantic as the class is made, too."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    first: int = 1
    """One line."""
    bare: int = 2
    given: int = Field(3, description="Given as an argument.")
    """And this is not read."""
    long: str = "a"
    """Two lines, of which

        the second is indented.
    """
    last: float = 1.0

    "Below an empty line, in plain quotes."

    class Inner(BaseModel):
        """A class in a class."""

        model_config = ConfigDict(use_attribute_docstrings=True)
        first: int = 1
        """That of the inner one."""

    def method(self) -> None:
        """No field's."""


def in_a_function() -> type[BaseModel]:
    class Plain(BaseModel):
        """With the name of another one of this file."""

        model_config = ConfigDict(use_attribute_docstrings=True)
        if True:
            unread: int = 0
            """Docstrings in a block are not read."""
        first: int = 1
        """That in a function."""

    return Plain


@pytest.mark.parametrize("found", [Plain, Plain.Inner, in_a_function()], ids=lambda found: found.__qualname__)
def test_texts_are_those_that_pydantic_reads(found: type[BaseModel]) -> None:
    theirs = {name: info.description for name, info in found.model_fields.items() if info.description}
    assert theirs
    assert field_texts(found) == theirs


class Base(Config):
    """With a field that is described."""

    rate: float = 1.0
    """Steps a second."""


class Slower(Base):
    """Another default, for the same reason."""

    rate: float = 0.5
    added: int = 0
    """Only here."""


def test_a_field_with_another_default_keeps_its_text() -> None:
    assert field_texts(Slower) == {"rate": "Steps a second.", "added": "Only here."}


def test_a_schema_has_the_texts() -> None:
    properties = Slower.model_json_schema()["properties"]
    assert {name: found["description"] for name, found in properties.items()} == field_texts(Slower)


def test_a_class_without_a_source_has_none() -> None:
    names = {"Config": Config, "__name__": "typed_at_a_prompt"}
    exec("class Typed(Config):\n    rate: float = 1.0\n    'Unknown.'\n", names)
    made = names["Typed"]
    assert isinstance(made, type)
    assert issubclass(made, Config)
    assert field_texts(made) == {}


def test_a_source_that_was_broken_since_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "edited_meanwhile.py"
    source.write_text("from nemorl.config import Config\nclass Edited(Config):\n    rate: float = 1.0\n    'Known.'\n")
    monkeypatch.syspath_prepend(tmp_path)
    edited = importlib.import_module("edited_meanwhile").Edited
    assert field_texts(edited) == {"rate": "Known."}
    source.write_text("class Edited(Config:\n")
    linecache.checkcache()
    assert field_texts(edited) == {}


class Computed(Config):
    """With a default that depends on another field."""

    size: int = 4
    half: int = Field(default_factory=lambda known: known["size"] // 2)


def test_a_default_that_others_set_is_described_without_them() -> None:
    size, half = Computed.describe_options()
    assert (size["default"], half["default"]) == (4, "set by other options")


def test_a_field_of_another_name_in_yaml_keeps_its_text() -> None:
    class Called(Config):
        """One field."""

        kind: str = Field("a", alias="type", description="Which one.")

    assert Called.model_json_schema()["properties"]["type"]["description"] == "Which one."
