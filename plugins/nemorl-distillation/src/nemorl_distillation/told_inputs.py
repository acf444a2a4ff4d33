"""Whether the teacher reads what it alone is told: each text of a context is swapped for that of another response.

A chat template that cuts a message short, or a model that looks no farther back than its window, drops the context and
says nothing of it: the teacher is then the policy, and teaches nothing. The check itself is
``nemorl_rl.audit.dead_inputs``, the one for images, sounds and observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice

from nemorl_rl.audit.dead_inputs import TRIED, Swap
from nemorl_tensors import TokenBatch

from nemorl_distillation.privileged import behind_prompts

FIX = (
    "see that the model's chat template writes whole messages, and that its window reaches from the response to the "
    "beginning of `teacher_prompt`; nothing was trained"
)


def kind_of(name: str) -> str:
    """The input that a placeholder of ``teacher_prompt`` stands for, in words."""
    return f"the {name} that only the teacher reads"


def told_swaps(
    batch: TokenBatch,
    prompt_tokens: Sequence[int],
    contexts: Sequence[Mapping[str, str] | None],
    prompt_of: Callable[[int, Mapping[str, str]], list[int]],
    names: Iterable[str],
    limit: int,
) -> Iterator[Swap]:
    """Of each text up to ``TRIED`` responses as the teacher reads them, and as it would behind another's text.

    Args:
        batch: The student's: one sequence per sample.
        prompt_tokens: Length of each sequence's own prompt.
        contexts: What the teacher is told of each, by placeholder.
        prompt_of: Token ids of the privileged prompt of a sequence that is told this.
        names: Of placeholders.
        limit: Most tokens of a sequence. One that would be longer is not read.
    """
    for name in names:
        texts = [*dict.fromkeys(told[name] for told in contexts if told is not None and told[name].strip())]
        made = 0
        for index, told in enumerate(contexts):
            if made == TRIED or told is None or told[name] not in texts:
                continue
            own = prompt_of(index, told)
            others = (prompt_of(index, {**told, name: text}) for text in _others(texts, told[name]))
            other = next((found for text in others if (found := in_its_place(own, text)) is not None), None)
            if other is None:
                continue
            alone, before = batch.select([index]), [prompt_tokens[index]]
            one, swapped = (behind_prompts(alone, before, [ids], limit).batch for ids in (own, other))
            if bool(one.mask.any()):
                made += 1
                yield Swap(kind_of(name), one, swapped)


def _others(texts: Sequence[str], own: str) -> Iterator[str]:
    """The texts of other responses, from the next on; then, where none will do, the text backwards."""
    place = texts.index(own)
    yield from [*texts[place + 1 :], *texts[:place]]
    if own[::-1] != own:
        yield own[::-1]


def in_its_place(own: Sequence[int], other: Sequence[int]) -> list[int] | None:
    """A prompt with what another one says differently in the place of its own words, cut or repeated to their length.

    Of one length, prompts that a model does not tell apart give log-probs that are equal to the last bit.

    Args:
        own: Token ids.
        other: Of the same template around another text.

    Returns:
        ``own`` where both are equal. None: they differ, and their difference cannot be put in the same place.

    Example:
        >>> in_its_place([1, 7, 8, 9, 2], [1, 5, 6, 2]), in_its_place([1, 2], [1, 2]), in_its_place([1, 2], [1, 5, 2])
        ([1, 5, 6, 5, 2], [1, 2], None)
    """
    if list(own) == list(other):
        return list(own)
    shorter = min(len(own), len(other))
    start = next((place for place in range(shorter) if own[place] != other[place]), shorter)
    end = next((place for place in range(shorter - start) if own[-1 - place] != other[-1 - place]), shorter - start)
    mine, theirs = own[start : len(own) - end], other[start : len(other) - end]
    put = [*islice(cycle(theirs), len(mine))]
    return None if len(put) < len(mine) or put == list(mine) else [*own[:start], *put, *own[len(own) - end :]]
