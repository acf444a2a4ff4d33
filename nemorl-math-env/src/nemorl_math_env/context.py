r"""Effect of the words beside an answer: ``not 5``, ``half of 5``, ``41 or 42``, ``5, no, 6``."""

from __future__ import annotations

import re

from nemorl_math_env.expressions import FUNCTIONS
from nemorl_math_env.units import MODIFIERS, MULTIPLIERS, word_set


def _phrases(text: str) -> str:
    """A pattern for any of the phrases, as whole words."""
    return rf"(?:{'|'.join(re.escape(phrase.strip()) for phrase in text.split(','))})\b"


# Before an answer.

_NEGATIONS = word_set("not never neither nor cannot")
_DENIALS = _NEGATIONS | word_set(
    """
    besides except unlike excluding doubt deny reject exclude eliminate discard avoid wrong false incorrect untrue
    impossible unlikely mistaken wrongly incorrectly mistakenly erroneously nobody
    ignore forget contrary tempting refuse unless
    if suppose assume imagine whether
    """
)
_DENYING_PHRASES = frozenset(
    (
        *("anything but", "everything but", "nothing but", "something but", "any number but", "all but", "except for"),
        *("rule out", "ruled out", "disagree with", "different from", "far from", "other than", "rather than"),
        *("instead of", "instead of the", "no one", "no way"),
    )
)
_BELIEFS = word_set("think say guess believe expect claim conclude answer write")
_OTHERS = word_set("you one some most people many students someone anyone everyone")
"""``People think it is 5``"""
_LINKS = _BELIEFS | word_set(
    """
    a an the it it's that that's this x is be been are was were would same equal equals to final correct right true
    my our your result value solution number total sum really actually possibly simply just exactly definitely certainly
    quite necessarily ever give gives have put case mean make makes yield yields lead leads come comes add adds up
    results in as for why =
    """
)
"""Words that may stand between a denial and what it denies: ``is not equal to the``. At others, and at a comma, the
denial ends: ``the number of those that do not swim is``."""
_CLAUSE = re.compile(r"[a-z]+(?:'[a-z]+)?|[^\s\w]|\d+")
_TURN = re.compile(r"\b(?:so|hence|thus|therefore|because|since|then)\b|(?<!thing )(?<!number )(?<!\ball )\bbut\b")
"""A denial before these speaks of something else: ``not 41 but``."""
DOUBTED = re.compile(
    r"(?:(?:n[’']t|\bnot|\bnever)\s+(?:think|believe|say|claim)|\bdoubt|\bdeny)\s+(?:that\s+)?(?:the\s+)?"
    r"(?:final\s+|correct\s+)?$",
    re.IGNORECASE,
)
"""``I don't think the`` (answer is 5)."""
_OTHER_BEFORE = re.compile(
    r"\b(?:or|vs\.?|versus|either)\s*$|(?:(?:\A|[a-z:(,])\s*-?[\d.]+|box(?:ed)?\{[^{}]*\})\s*,?\s*(?:and|to|through|/)\s*$"
    r"|\bbetween\b[^.;:]*\band\s*$"
    r"|(?:\A|[:(]\s*)[-\d./]+\s*,\s*$",
    re.IGNORECASE,
)
"""``41 or``."""
_APPOSED = re.compile(r"(?:\)|\d\s*(?:[-+*/^]|\\cdot|\\times)\s*\d+)\s*,\s*or\s*$")
"""``18 * 17, or``: the same, worked out."""
CHANGED = re.compile(
    r"\b(?:at (?:least|most)|(?:more|less|fewer|greater|other|rather|larger|smaller|higher|lower) than|over|under|above"
    r"|below|up to|close to|between|either|about|around|approximately|almost|nearly|roughly)\s+(?:[a-z]+\s+)?$",
    re.IGNORECASE,
)
_BOUNDED = re.compile(
    r"\b(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|higher|lower|bigger) than|and over|just under"
    r"|\b(?:add|subtract|multiply|divide|take|deduct)\b[^,.]*\b(?:(?<!equal )to|from|by)"
    r"|above|below|up to|close to|next to|between|almost|nearly|exceeds?|exceeding"
    r"|(?:multiplied|divided|increased|decreased|reduced) by)\s*$",
    re.IGNORECASE,
)
"""An approximation (``about``) is what some tasks ask for; a bound is not."""
_MINIMUM = re.compile(r"\bat (?:least|most)[\s$]*$", re.IGNORECASE)
_PART_OF = re.compile(r"([A-Za-z]+)\s+(?:of|to|from)\s+(?:the\s+)?$")
"""``half of 42``."""
_PARTS = (MODIFIERS - word_set("all each every some any up to and")) | word_set(
    """
    square cube multiple multiples divisor divisors factor factors opposite reciprocal negation negative inverse
    complement digits logarithm sine cosine tangent next close far
    """
)
CHANGING_BEFORE = (MODIFIERS | FUNCTIONS | word_set("near root than besides")) - word_set("to all and some positive up")
"""``twice 5``, ``sqrt 5``."""
_SCALING_BEFORE = (MULTIPLIERS.keys() | FUNCTIONS) | word_set(
    "half double triple twice thrice minus negative plus times root modulo mod near than squared"
)
_STRUCK = re.compile(r"(?:~~|<(?:del|s|strike)>)[\s$*_`]*$")

# After an answer.

_SCALING_AFTER = MULTIPLIERS.keys() | word_set(
    "half halves thirds quarters squared cubed increased decreased reduced divided multiplied factorial"
)
_OTHER_AFTER = re.compile(
    r"[,(\s–—-]*(?:(?:or|and|vs|versus|to|through|maybe|perhaps|possibly|alternatively)\b[\s:,.]*)+"
    r"(?:\$|\\|[-−(]?\d|(?:more|less|higher|fewer|else|so|maybe|perhaps|possibly|one|a half|a third|a quarter"
    r"|halve|double|triple|square|add|subtract|multiply|divide)\b)|\s*(?:more|less|fewer|greater|higher|lower) than\b"
    r"|[,(\s]*(?:/|\||→|⇒|➜|->)\s*\$?-?\d|\s*;\s*\$?-?\d[\d.,]*\$?[\s.!]*\Z",
    re.IGNORECASE,
)
"""``or 43``, ``(or 43)``, ``or more``, ``→ 43``, ``; 43``."""
_COMPUTED_AFTER = re.compile(r"[\s)]*(?:plus|minus|times|less|point)\s+[$\\(\d]", re.IGNORECASE)
_CROSSED = re.compile(r"[\s$*_`).]*[❌✗✘🚫❎👎]")
_WRONG = r"(?:wrong|incorrect|false|untrue|impossible|an?\s(?:mistake|error)|out\sof\sthe\squestion)\b"
_JUDGED = re.compile(
    rf"""
    [\s,(]* (?:which\ )? (?:
        (?:(?:is|was|would\ be|will\ be|must\ be|seems|looks|can(?:not|[’']t)\ be)\s+(?:\w+\s+)?)? {_WRONG}
      | (?: (?:is|was|are|does|did|do|would|could|can|will|should)(?:\s+not|n[’']t|\s+never) | cannot | can[’']t )
        (?= \s+(?:be|the|my|our|right|correct|it|true|what|a\ solution|an\ answer|work|hold|possible|valid|fit)\b
          | [\s.]*$ )
      | (?:not|never)\s*$ )
    | (?!.*(?:\d|\b(?:since|because|as|while|so|others?|any|if|unless)\b))
      .*\b(?:is|was)\ (?: {_WRONG} | not\ (?:the\ |my\ )?(?:right|correct|true|answer)\b )
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""``is wrong``, ``cannot be right``."""
_REGRET = _phrases(
    "wait, nope, hmm, oops, sorry, hold on, scratch that, strike that, on second thought, my mistake, never mind,"
    "make that, not really, i mean, i meant, i am joking, i'm joking, just kidding, i don't think so"
)
_CORRECTION = re.compile(
    rf"""
    (?: \A | [.,;:!?()–—\n-] | \bbut ) \s* (?:(?:oh|but|ah)[,\s]+)? (?:
        {_REGRET}
      | no\b (?= \s*(?:[,.:;!–—-] | $ | wait\b | (?:it|that|the)\b | [$\d]) )
      | (?:correction|edit|update|revised) \s* :
      | (?:or\ )? rather [,\s]+ [$\\\d]
      | (?:actually|in\ fact) [,\s]+ (?:(?:it|that|this|the\ answer)(?:[’']s|\ is|\ should\ be|\ must\ be)\s+)?
        (?: [$\\] | -?\d | not\b )
      | (?:this|that|it|which|the\ above|the\ answer|i)
        (?: [’']s | \ (?:is|was|were|may\ be|could\ be|might\ be) ) \s+ (?:actually\ |clearly\ )?
        (?: {_WRONG} | not\ (?:right|correct|true) )
      | \b(?:it|the\ (?:\w+\ )?(?:answer|total|result))(?:[’']s|\ is|\ was|\ equals)\s+(?:really\ |actually\ )?[$\\\d]
      | (?:it|that|this|the\ answer)\ (?:should|must|ought\ to)\ (?:be|have\ been)\b
    )
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""``Wait``, ``no, 43``, ``that is wrong``: what follows counts."""

_SAID = re.compile(r"[A-Za-z]{2}")
_MARKUP = re.compile(r"\\text[a-z]*\s*\{([^{}]*)\}|[$*_`~]|\\[\[\]()]|<[^<>]{0,80}>|\\[,;:! ]")
_SENTENCE = re.compile(r"\n|[.!?;](?=[\s*])")


def is_changed(before: str, after: str = "") -> bool:
    """The words right before a formula deny it or make another value of it: ``not``, ``41 or``, ``half of``."""
    if re.match(r"[\s$]*[a-z]{3,}", after):  # at least 5 eggs, which is what a task asks for
        before = _MINIMUM.sub("", before)
    sentence = _SENTENCE.split(before.rpartition("\n")[2])[-1].strip(" $*")
    if not sentence:
        return False
    said = _MARKUP.sub(r"\1", sentence).rstrip() + " "
    beside = re.search(r"([A-Za-z]+)\s*$", said)
    return (
        (beside is not None and beside[1].casefold() in _SCALING_BEFORE)
        or is_denied(said)
        or (_OTHER_BEFORE.search(said) is not None and _APPOSED.search(said) is None)
        or _BOUNDED.search(said) is not None
        or is_part(said)
    )


def is_denied(said: str) -> bool:
    """``not``, ``is certainly not equal to``, ``it would be wrong to say``, ``many think that it is``."""
    words = _CLAUSE.findall(_TURN.split(said.casefold().replace("’", "'"))[-1])
    if words[-1:] == [":"] and (words[-2:-1] == [] or not _is_negation(words[-2])):
        return False
    words = words[:-1] if words[-1:] == [":"] else words
    count = len(words)
    while count and words[count - 1] in _LINKS:
        count -= 1
    links, kept = words[count:], words[:count]
    if not kept:
        return False
    if kept[-1] in ("could", "might", "may"):
        return links[:1] == ["be"] or not _BELIEFS.isdisjoint(links)
    if kept[-1] in ("mistake", "error", "trap", "misconception"):
        return links[:1] in (["is"], ["was"], ["would"])
    if kept[-1] == "doubt" and not {"no", "without", "beyond"}.isdisjoint(kept[-3:]):
        return False
    return (
        kept[-1] in _DENIALS
        or _is_negation(kept[-1])
        or " ".join(kept[-2:]) in _DENYING_PHRASES
        or " ".join(kept[-3:]) in _DENYING_PHRASES
        or (kept[-1] in _OTHERS and not _BELIEFS.isdisjoint(links[:2]))
    )


def _is_negation(word: str) -> bool:
    return word in _NEGATIONS or word.endswith("n't")


def is_taken_back(after: str) -> bool:
    """The words right after it deny it, scale it, or offer another value: ``is wrong``, ``million``, ``or 43``."""
    if not after.strip(" $*.\n"):
        return False
    said = _MARKUP.sub(r"\1", _SENTENCE.split(after, maxsplit=1)[0])
    word = re.match(r"[\s)]*([A-Za-z]+)", said)
    return (
        (word is not None and word[1].casefold() in _SCALING_AFTER)
        or _COMPUTED_AFTER.match(said) is not None
        or _CROSSED.match(after) is not None
        or _OTHER_AFTER.match(said) is not None
        or _OTHER_AFTER.match(after) is not None
        or _JUDGED.match(said.lstrip(")")) is not None
    )


def corrected(after: str) -> str | None:
    """The text after the response has taken its answer back; ``None`` where it has not."""
    if _SAID.search(after) is None:
        return None
    found = _CORRECTION.search(after)
    return None if found is None else after[found.start() :]


def is_struck(before: str) -> bool:
    """It stands in ``~~…~~`` or ``<del>…</del>``."""
    return _STRUCK.search(before) is not None


def is_supposed(before: str, after: str) -> bool:
    """``would be 5 if``"""
    return before.rstrip(" $*").endswith("would be") and re.match(r"[\s$*]*if\b", after) is not None


def is_part(before: str) -> bool:
    """``half of``, ``the square root of``."""
    found = _PART_OF.search(before)
    return found is not None and found[1].casefold() in _PARTS
