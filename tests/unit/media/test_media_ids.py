"""Items among token ids: named by content, so that ids alone tell what a model is shown."""

from __future__ import annotations

import pickle

import numpy
import torch
from nemorl.errors import DataError
from nemorl.media import FIRST_ID, MAX_TOKENS, Media, is_media, media_runs, shown_names
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.prefix_forest import PrefixForest
from nemorl_testing.seeing_parts import words
from recorded_messages import Raises

CAT, DOG = Media("image", b"cat"), Media("image", b"dog")


def shown(item: Media, *, before: int = 5, after: tuple[int, ...] = (6, 7)) -> list[int]:
    return [before, *item.token_ids(3), *after]


def batch_of(*sequences: tuple[list[int], tuple[Media, ...]]) -> TokenBatch:
    """The last token of each is trained on."""
    masks = [[False] * (len(ids) - 1) + [True] for ids, _ in sequences]
    media = [item for _, items in sequences for item in items]
    return TokenBatch.from_sequences([ids for ids, _ in sequences], masks, media=media)


def test_ids_are_beyond_any_vocabulary_and_within_int64() -> None:
    ids = [*CAT.token_ids(MAX_TOKENS)]
    assert min(ids) >= FIRST_ID == 2**62
    assert max(ids) < 2**63
    assert {id >> 14 for id in ids} == {CAT.name}


def test_items_with_other_content_or_of_another_kind_have_other_ids() -> None:
    names = {CAT.name, DOG.name, Media("audio", b"cat").name, Media("image", b"cat", digest="ab" * 32).name}
    assert len(names) == 4
    assert Media("image", b"cat").name == CAT.name


def test_runs_end_where_another_item_begins_or_the_same_one_again() -> None:
    ids = [5, *CAT.token_ids(2), *DOG.token_ids(1), *DOG.token_ids(2), 9]
    assert [*media_runs(ids)] == [(1, 3), (3, 4), (4, 6)]
    assert words(ids, placeholder=1) == [5, 1, 1, 1, 1, 1, 9]
    assert shown_names(ids) == {CAT.name, DOG.name}
    assert [is_media(id) for id in ids] == [False, True, True, True, True, True, False]


def test_sequences_that_differ_in_an_image_alone_share_what_is_before_it() -> None:
    forest = PrefixForest.of_batch(batch_of((shown(CAT), (CAT,)), (shown(DOG), (DOG,))))
    # 5 tokens of each are fed; the first is all that they share.
    assert (forest.sequence_tokens, forest.tokens) == (10, 9)
    same = PrefixForest.of_batch(batch_of((shown(CAT), (CAT,)), (shown(CAT, after=(6, 8)), (CAT,))))
    assert (same.sequence_tokens, same.tokens) == (10, 5)


def test_common_prefixes_are_found_among_ids_of_64_bits() -> None:
    """The order of bytes is that of numbers, also above 2^32."""
    generator = numpy.random.default_rng(0)
    pool = [3, 2**31, 2**33, *CAT.token_ids(2), *DOG.token_ids(2)]
    sequences = [[int(generator.choice(pool)) for _ in range(generator.integers(1, 6))] for _ in range(64)]
    flat = numpy.array([id for ids in sequences for id in ids])
    lengths = numpy.array([len(ids) for ids in sequences])
    forest = PrefixForest.of(flat, lengths.cumsum() - lengths, lengths)
    assert [sequences[i] for i in forest.order] == sorted(sequences)


def test_a_batch_holds_each_item_once_and_those_that_it_shows() -> None:
    batch = batch_of((shown(CAT), (CAT,)), (shown(CAT), (CAT,)), (shown(DOG), (DOG, CAT)), ([5, 6], ()))
    assert set(batch.media.values()) == {CAT, DOG}
    assert set(batch.select([2]).media.values()) == {DOG}
    assert batch.select([3]).media == {}
    first, second = batch.minibatches(2)
    assert (set(first.media.values()), set(second.media.values())) == ({CAT}, {DOG})
    again = pickle.loads(pickle.dumps(batch, protocol=5))
    assert again.media == batch.media
    assert torch.equal(again.token_ids, batch.token_ids)


def test_an_item_that_is_not_there_is_refused(raises: Raises) -> None:
    with raises(DataError):
        batch_of((shown(CAT), (DOG,)))


def test_an_item_is_never_learnt(raises: Raises) -> None:
    with raises(DataError):
        TokenBatch.from_sequences([shown(CAT)], [[False, True, True, True, True, True]], media=[CAT])


def test_samples_bring_their_items() -> None:
    ids = tuple(shown(CAT))
    prompt = Prompt(0, "", ids[:-1], media=(CAT,))
    mask = (False,) * 5 + (True,)
    sample = Sample(prompt, ids, mask, (0.0,) * 6, Score(1.0), "", "stop", media=(CAT,))
    assert TokenBatch.from_samples(Samples([sample, sample])).media == {CAT.name: CAT}
