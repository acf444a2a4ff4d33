"""Processed items are kept up to a number of bytes, the last used ones, whichever threads ask; of items one copy."""

from __future__ import annotations

import pickle
import random
import threading
import weakref
from dataclasses import dataclass

import pytest
from nemorl.media import Media
from nemorl_media.kept_items import KeptItems, one_copy


@dataclass(frozen=True)
class Block:
    nbytes: int


def test_what_was_used_longest_ago_goes_first() -> None:
    kept = KeptItems[Block](100)
    for name in ("a", "b"):
        kept.keep(name, Block(40))
    assert kept.get("a") == Block(40)
    kept.keep("c", Block(40))  # 120 bytes: b, as a was used since
    assert [kept.get(name) is not None for name in "abc"] == [True, False, True]
    kept.keep("c", Block(50))  # in place of its 40: 90 bytes
    assert [kept.get(name) is not None for name in "abc"] == [True, False, True]
    kept.keep("d", Block(500))
    assert [kept.get(name) is not None for name in "abcd"] == [False, False, False, True]


def test_a_copy_begins_empty() -> None:
    kept = KeptItems[Block](100)
    kept.keep("a", Block(1))
    assert pickle.loads(pickle.dumps(kept)).get("a") is None


def test_who_asks_while_an_item_is_made_gets_it_and_a_failure_is_not_kept() -> None:
    kept, made = KeptItems[Block](100), list[int]()
    begun, finish = threading.Event(), threading.Event()

    def make() -> Block:
        made.append(1)
        begun.set()
        finish.wait()
        return Block(1)

    found: list[Block] = []
    threads = [threading.Thread(target=lambda: found.append(kept.made("a", make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    finish.set()
    for thread in threads:
        thread.join()
    assert (len(made), found) == (1, [Block(1)] * 4)

    def fail() -> Block:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        kept.made("b", fail)
    assert kept.made("b", lambda: Block(2)) == Block(2)


def test_equal_items_are_one_as_long_as_somebody_holds_it() -> None:
    first = one_copy(Media("image", b"abc"))
    assert one_copy(Media("image", b"abc")) is first
    assert one_copy(Media("audio", b"abc")) is not first
    assert pickle.loads(pickle.dumps(first)) == first
    place = weakref.ref(first)
    del first
    assert place() is None


def test_threads_may_ask_at_once() -> None:
    kept = KeptItems[Block](50)
    failed: list[Exception] = []

    def use(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for _ in range(3000):
                name = dice.choice("abcdefgh")
                if kept.get(name) is None:
                    kept.keep(name, Block(10))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(kept.get(name) is not None for name in "abcdefgh") == 5  # of 10 bytes in 50
