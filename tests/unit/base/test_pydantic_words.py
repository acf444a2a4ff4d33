"""What pydantic found wrong, said to somebody who wrote YAML."""

from __future__ import annotations

import pytest
from nemorl.base.text.pydantic_words import in_words
from pydantic import BaseModel, Field, ValidationError


class Server(BaseModel):
    url: str = Field("https://node7", pattern=r"^https?://")
    name: str = Field("n", min_length=1, max_length=3)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("url", "node7:8000", ("'node7:8000' has another form", "give text that matches ^https?://")),
        ("name", "", ("'' has 0 characters", "give at least 1")),
        ("name", "long", ("'long' has 4 characters", "give at most 3")),
        ("name", 3, ("expected text, got 3", "give text")),
    ],
)
def test_a_text_that_does_not_fit_is_not_asked_to_be_text(key: str, value: object, said: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as found:
        Server.model_validate({key: value})
    assert in_words(found.value.errors()[0], key) == said  # type: ignore[arg-type]
