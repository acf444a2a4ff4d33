"""Whose fault an exception is, and what the author of a plugin is told of it."""

from __future__ import annotations

from nemorl.errors import UsageError
from nemorl_testing.attribution import describe


def test_the_fix_of_an_error_reaches_the_author_of_the_plugin() -> None:
    try:
        raise UsageError("the batch has no reference_logprobs", fix="let `needs_reference` return True")
    except UsageError as error:
        said = describe(error, __name__)
    head, place = said.split("\n")
    assert head == ("the plugin raised the batch has no reference_logprobs (fix: let `needs_reference` return True)")
    assert place.strip().endswith("in test_the_fix_of_an_error_reaches_the_author_of_the_plugin")
