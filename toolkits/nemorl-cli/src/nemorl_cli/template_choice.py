"""Finding a config template: what each says of itself, and which of them suit a wish like "8 GPUs, math, Qwen3-8B".

A template describes itself in its second line, ``# task: math | hardware: 8 GPUs | model: 8B | uses: vLLM, LoRA``. A
wish is matched word by word against that, against other words for the same (``OTHER_WORDS``), the template's name
and its first line. Words that few templates have count for more, by the weights of BM25.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

FACTS = ("task", "hardware", "model", "uses")
"""Keys of a template's second line."""
GPUS_PER_NODE = 8
"""Of a node whose GPUs are not counted."""
FULL, HALF = 2, 1
"""Points of a word that the template is made for, and of one that is near, means the same, or stands in its first line
alone."""
SHOWN = 5
"""Best matches that are shown."""

_NUMBERS = {"one": 1, "single": 1, "two": 2, "four": 4, "eight": 8}
_COUNT = rf"(?P<count>\d+|{'|'.join(_NUMBERS)})"
_DEVICES = re.compile(rf"\b{_COUNT}[\sx×*-]*(?P<kind>gpu|node|[abhl]\d{{2,3}})s?\b", re.IGNORECASE)
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s?(?:b|billion)\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_IDLE = re.compile(
    "a|an|and|are|as|at|be|by|can|do|for|from|has|have|i|in|into|is|it|just|let|like|make|me|models?|my|no|of|on|one|only|or"
    "|over|please|some|so|teach|than|that|the|them|they|this|to|train|training|two|want|with"
)
"""Words of a wish that say nothing."""
_COMMON_LETTERS = 5
"""Words that begin with as many same letters as this, one with all of the other, are one: distill, distillation."""


@dataclass(frozen=True)
class TemplateFacts:
    """A template's description of itself."""

    name: str
    summary: str
    algorithm: str
    facts: Mapping[str, tuple[str, ...]]
    """By the names in ``FACTS``."""

    @property
    def gpus(self) -> int | None:
        return gpus_in(" ".join(self.facts["hardware"]))

    @property
    def billions(self) -> float | None:
        return billions_in(" ".join(self.facts["model"]))


@dataclass
class Match:
    """How well a template suits a wish, and why."""

    template: TemplateFacts
    score: float = 0
    fits: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def add(self, wish: str, points: int, reason: str, weight: float = 1.0) -> None:
        self.score += points * weight
        (self.fits if points else self.lacks).append(f"{wish} ({reason})" if reason else wish)


def facts_of(name: str, summary: str, text: str) -> TemplateFacts:
    """The description in a template's text."""
    line = next(iter(text.splitlines()[1:2]), "")
    parts = (part.partition(":") for part in line.lstrip("# ").split("|")) if line.startswith("#") else ()
    said = {key.strip(): value for key, _, value in parts}
    facts = {key: tuple(tag.strip() for tag in said[key].split(",")) if key in said else () for key in FACTS}
    algorithm = re.search(r"^algorithm:\s*(\w+)", text, re.MULTILINE)
    return TemplateFacts(name, summary, algorithm[1] if algorithm else "", facts)


def choose(wish: str, templates: Sequence[TemplateFacts]) -> list[Match]:
    """The templates that suit a wish, best first; those that suit it half as well as the best are left out."""
    words = [(word, [_word_points(word, template) for template in templates]) for word in _words(wish)]
    matches = [_match(wish, template) for template in templates]
    for word, found in words:
        weight = _rarity(sum(points > 0 for points, _ in found), len(templates))
        for match, (points, reason) in zip(matches, found, strict=True):
            match.add(word, points, reason, weight)
    best = max((match.score for match in matches), default=0)
    good = [match for match in matches if match.score * 2 > best]
    return sorted(good, key=_order)[:SHOWN]


def _order(match: Match) -> tuple[float, int, int, str]:
    """Best first; of equals the one for the smallest machine, and the plainest."""
    template = match.template
    return -round(match.score, 6), template.gpus or 1, len(template.facts["uses"]), template.name


def unknown_words(wish: str, templates: Sequence[TemplateFacts]) -> list[str]:
    """Words of a wish that no template knows."""
    return [word for word in _words(wish) if not any(_word_points(word, template)[0] for template in templates)]


def gpus_in(text: str) -> int | None:
    """GPUs that a text speaks of: ``8 GPUs``, ``one H100``, ``4 nodes``, ``2 nodes of 4 GPUs``."""
    counts = {"node": 0, "gpu": 0}
    for found in _DEVICES.finditer(text):
        number = _NUMBERS.get(found["count"].lower()) or int(found["count"])
        counts["node" if found["kind"].lower() == "node" else "gpu"] = number
    if counts["node"]:
        return counts["node"] * (counts["gpu"] or GPUS_PER_NODE)
    return counts["gpu"] or None


def billions_in(text: str) -> float | None:
    """Billions of parameters that a text speaks of: 8 in ``Qwen3-8B``, 30 in ``Qwen3-30B-A3B``."""
    found = _SIZE.search(text)
    return float(found[1]) if found else None


def _match(wish: str, template: TemplateFacts) -> Match:
    match = Match(template)
    if (wanted := gpus_in(wish)) is not None:
        points, reason = _gpu_points(wanted, template.gpus)
        match.add(f"{wanted} GPU{'s' * (wanted > 1)}", points, reason)
    if sizes := [float(found[1]) for found in _SIZE.finditer(wish)]:  # of several, any: a teacher has its own
        points, reason, size = max((*_size_points(size, template), size) for size in sizes)
        match.add(f"{size:g}B", points, reason)
    return match


def _rarity(having: int, templates: int) -> float:
    """The weight of a word that so many templates have, as in BM25."""
    return math.log(1 + (templates - having + 0.5) / (having + 0.5))


def _gpu_points(wanted: int, has: int | None) -> tuple[int, str]:
    if has is None:
        return 0, ""
    if has == wanted:
        return FULL, ""
    said = f"written for {has}"
    return (HALF, f"{said}: change `cluster`") if has / 2 <= wanted <= has * 2 else (0, said)


def _size_points(wanted: float, template: TemplateFacts) -> tuple[int, str]:
    has = template.billions
    if has is None:
        return 0, ""
    reason = "" if has == wanted else f"written for {has:g}B"
    return (FULL if 2 / 3 <= wanted / has <= 3 / 2 else HALF if 1 / 3 <= wanted / has <= 3 else 0), reason


def _word_points(word: str, template: TemplateFacts) -> tuple[int, str]:
    places = {fact: " ".join(template.facts[fact]) for fact in ("task", "uses", "hardware", "model")}
    places |= {"algorithm": template.algorithm, "name": template.name}
    for place, text in places.items():
        if any(_same(word, other) for other in _split(text)):
            return FULL, place
    for tag in (*template.facts["task"], *template.facts["uses"]):
        if any(_same(word, other) for other in _split(OTHER_WORDS.get(tag.lower(), ""))):
            return HALF, tag
    return (HALF, "first line") if any(_same(word, other) for other in _split(template.summary)) else (0, "")


def _words(wish: str) -> list[str]:
    """The words of a wish but for hardware and sizes, each once."""
    rest = _DEVICES.sub(" ", wish)
    rest = " ".join(part for part in rest.replace(",", " ").split() if not _SIZE.search(part))
    return list(dict.fromkeys(word for word in _split(rest) if not _IDLE.fullmatch(word)))


def _split(text: str) -> Iterator[str]:
    return (word.lower() for word in _WORD.findall(text.replace("-", "")))


def _same(one: str, other: str) -> bool:
    one, other = one.rstrip("s"), other.rstrip("s")
    short, long = sorted((one, other), key=len)
    return one == other or (len(short) >= _COMMON_LETTERS and long.startswith(short))


OTHER_WORDS: Mapping[str, str] = {
    # tasks
    "math": "maths mathematical exercises problems equations calculate olympiad competition numbers proofs",
    "reasoning": "think thinking thoughts r1 o1 deepseek step-by-step logic chain-of-thought cot",
    "arithmetic": "sums addition plus",
    "first run": "try tutorial beginner start hello example simple learn quick cheap school",
    "code": "coding coder python javascript functions software unit tests leetcode bugs sql write",
    "tool use": "tools functions call calling search engine api browser retrieval web",
    "agents": "agent agentic assistant act rounds steps several turns environment",
    "games": "game play puzzle moves board chess sudoku",
    "chat": "chatbot assistant dialogues conversations support customer helpful bot",
    "alignment": "align polite safe harmless tone style behaviour values",
    "rlhf": "human feedback taste people",
    "writing": "essays poems stories creative free-form text letters summaries",
    "instructions": "instruction follow examples demonstrations logs prompts imitate",
    "fine-tuning": "finetune finetuning tune adapt domain supervised own facts knowledge question answer pairs",
    "preferences": "preference better worse compare choose chosen rejected thumbs votes ranking liked prefer pick",
    "reward model": "scorer score rate rates classifier judge taste grade rating human",
    "distillation": "distil distill compress shrink student teacher imitate copy big bigger larger good",
    "long documents": "books reports papers summarise summarize articles contracts long",
    # what they use
    "given responses": "saved answers file texts offline generated already recorded written",
    "async": "overlap wait waits idle parallel simultaneously same time off-policy pipeline",
    "moe": "mixture mixture-of-experts sparse",
    "judge": "gpt-4 claude grades grader grade llm-as-a-judge opinion",
    "small memory": "little memory vram consumer 24gb 16gb rtx 4090 3090 qlora cheap low fits",
    "many nodes": "cluster multi-node huge slurm supercomputer large",
    "critic": "value function actor-critic gae baseline",
    "other tokenizer": "different vocabulary tokens",
    "small data": "tiny few little",
    "overfitting": "overfit overfits",
    "generated data": "synthetic nothing",
    "long context": "long 32k 128k tokens",
    "packing": "short texts padding faster efficient",
    "margin": "stars scale how much degrees",
}
"""By a tag of a template's second line: other words for it."""
