"""Where items stand in token ids: each whole, told from its neighbours, whatever stands between its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from nemorl.errors import BackendError
from nemorl.media import Media, MediaKind
from nemorl_media.family import Family, Item, Seen
from nemorl_media.places import as_words, named_in, placed
from recorded_messages import Raises
from torch import nn

CAT, DOG, BARK = Media("image", b"cat"), Media("image", b"dog"), Media("audio", b"bark")


class Lengths(Family):
    """An item has as many tokens as bytes."""

    towers: ClassVar[Sequence[str]] = ("tower",)

    @property
    def placeholders(self) -> Mapping[MediaKind, int]:
        return {"image": 7, "audio": 8}

    def process(self, media: Media) -> Item:
        return Item(media, {}, (1, 1, len(media.data)))

    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        raise NotImplementedError


@pytest.fixture
def family() -> Lengths:
    return Lengths(SimpleNamespace(model_type="lengths"), "", {})


def places(ids: Sequence[int], family: Family, *items: Media) -> list[tuple[Any, ...]]:
    found = placed(ids, named_in(ids, items), family)
    return [(one.item.media, one.start, one.is_item) for one in found]


def test_items_side_by_side_are_told_apart_also_the_same_one_twice(family: Lengths) -> None:
    #      0  1 2 3                   4 5 6                   7 8 9                   10
    ids = [5, *CAT.token_ids(3), *CAT.token_ids(3), *DOG.token_ids(3), 6]
    whole = (True, True, True)
    assert places(ids, family, DOG, CAT) == [(CAT, 1, whole), (CAT, 4, whole), (DOG, 7, whole)]


def test_markers_between_the_parts_of_an_item_belong_to_its_place(family: Lengths) -> None:
    first, second, third = CAT.token_ids(3)
    ids = [first, second, 9, 9, third, 6, *DOG.token_ids(3)]
    assert places(ids, family, CAT, DOG) == [(CAT, 0, (True, True, False, False, True)), (DOG, 6, (True,) * 3)]


@pytest.mark.parametrize("left_out", range(4))
def test_an_item_that_lacks_any_token_is_refused(family: Lengths, left_out: int, raises: Raises) -> None:
    bark = list(BARK.token_ids(4))
    ids = [5, *bark[:left_out], *bark[left_out + 1 :], 6]
    if left_out in (1, 2):  # what is missing leaves a gap: two parts, of which the second has lost its beginning
        ids.insert(1 + left_out, 9)
    with raises(BackendError, "whole"):
        places(ids, family, BARK)


def test_words_have_the_placeholder_of_each_kind(family: Lengths) -> None:
    ids = [5, *CAT.token_ids(2), 6, *BARK.token_ids(1)]
    items = named_in(ids, [CAT, BARK, DOG])
    assert items.keys() == {CAT.name, BARK.name}
    assert as_words(ids, items, family.placeholders) == (5, 7, 7, 6, 8)


def test_an_item_that_does_not_come_with_the_ids_is_missed(raises: Raises) -> None:
    with raises(BackendError, 1):
        named_in([5, *CAT.token_ids(2), *DOG.token_ids(2)], [DOG])
