"""The hand-written answer pairs, and right answers with one thing changed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("answer_pairs.txt")


@dataclass(frozen=True)
class Pair:
    truth: str
    response: str
    is_right: bool
    category: str


def written_pairs() -> list[Pair]:
    """All pairs of the file. Answers without ``:`` are put into a box, as a policy does."""
    pairs, truth, category = [], "", ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            category = line.removeprefix("## ")
        elif line.startswith("  "):
            mark, _, answer = line.strip().partition(" ")
            response = answer.replace("\\n####", "\n####") if mark.endswith(":") else rf"\boxed{{{answer}}}"
            kind = "unevaluated" if mark == "~" else category
            pairs.append(Pair(truth, response, mark.startswith("="), kind))
        elif line and not line.startswith("#"):
            truth = line
    return pairs


def whole_responses(name: str) -> list[Pair]:
    """The pairs of a file of whole responses."""
    pairs, truth, category = [], "", ""
    for line in FILE.with_name(name).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            category = line.removeprefix("## ")
        elif line.startswith("  "):
            mark, _, response = line.strip().partition(" ")
            pairs.append(Pair(truth, response.replace("⏎", "\n"), mark == "=", category))
        elif line and not line.startswith("#"):
            truth = line
    return pairs


def right_answers() -> list[str]:
    """Every text that is right for some task: the tasks' answers, and those that equal them."""
    return list(dict.fromkeys(pair.truth for pair in written_pairs()))


def generated_pairs(*, seed: int = 0, rounds: int = 12) -> list[Pair]:
    """Answers built from drawn numbers: rewritten ones are right, and ones with one thing changed are wrong."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(rounds):
        for make in (_number, _fraction, _polynomial, _root, _complex, _power, _measure, _point, _wave, _curve, _bound):
            truth, right, wrong = make(rng)
            pairs += [Pair(truth, rf"\boxed{{{answer}}}", True, f"generated {make.__name__[1:]}") for answer in right]
            pairs += [Pair(truth, rf"\boxed{{{answer}}}", False, f"generated {make.__name__[1:]}") for answer in wrong]
    return pairs


Made = tuple[str, list[str], list[str]]


def _signed(n: int) -> str:
    return f"+{n}" if n >= 0 else f"-{-n}"


def _draw(rng: random.Random, low: int = 2, high: int = 9) -> int:
    return rng.choice((-1, 1)) * rng.randint(low, high)


def _number(rng: random.Random) -> Made:
    n = _draw(rng, 1001, 99999)
    text = f"{abs(n):,}"
    return (
        str(n),
        [f"{n}.0", f"{'-' * (n < 0)}{text}", f"x={n}", f"{2 * n}/2", f"{n / 1000}e3"],
        [str(n + 1), str(-n), f"{n}0", f"{n}x", f"{n}i", f"{n}!", f"{n} million", f"{n}, {n + 1}", f"0.{abs(n)}"],
    )


def _fraction(rng: random.Random) -> Made:
    p, q = _draw(rng, 1, 40), rng.choice((7, 11, 13, 17))
    p += p % q == 0
    other = q + 1
    return (
        rf"\frac{{{p}}}{{{q}}}",
        [f"{p}/{q}", rf"\dfrac{{{p}}}{{{q}}}", rf"\frac{{{2 * p}}}{{{2 * q}}}", f"{p / q:.9f}"],
        [f"{-p}/{q}", f"{q}/{p}", f"{p}/{other}", f"{p + 1}/{q}", f"{p}", f"{p},{q}", f"{p / q:.3f}", f"{p}/{q}x"],
    )


def _polynomial(rng: random.Random) -> Made:
    a, b, c = (_draw(rng) for _ in range(3))
    return (
        f"{a}x^2{_signed(b)}x{_signed(c)}",
        [f"{c}{_signed(b)}x{_signed(a)}x^2", f"x({a}x{_signed(b)}){_signed(c)}", f"{a}*x**2{_signed(b)}*x{_signed(c)}"],
        [
            f"{-a}x^2{_signed(b)}x{_signed(c)}",
            f"{a}x^2{_signed(-b)}x{_signed(c)}",
            f"{a}x^2{_signed(b)}x{_signed(-c)}",
            f"{a}x^3{_signed(b)}x{_signed(c)}",
            f"{a}x^2{_signed(b)}y{_signed(c)}",
            f"{a}y^2{_signed(b)}y{_signed(c)}",
            f"{a}x^2{_signed(b)}x{_signed(c + 1)}",
            f"{a + 1}x^2{_signed(b)}x{_signed(c)}",
            f"{a}x^2{_signed(b)}x",
            f"{c}",
        ],
    )


def _root(rng: random.Random) -> Made:
    a, b, c = rng.randint(2, 9), rng.choice((2, 3, 5, 7, 11)), rng.choice((13, 17, 19))
    return (
        rf"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}",
        [f"{a}*sqrt({b})/{c}", rf"\frac{{\sqrt{{{a * a * b}}}}}{{{c}}}", rf"\frac{{{a * b}}}{{{c}\sqrt{{{b}}}}}"],
        [
            rf"\frac{{{a}\sqrt{{{b + 1}}}}}{{{c}}}",
            rf"\frac{{{a + 1}\sqrt{{{b}}}}}{{{c}}}",
            rf"-\frac{{{a}\sqrt{{{b}}}}}{{{c}}}",
            rf"\frac{{{a}\sqrt[3]{{{b}}}}}{{{c}}}",
            rf"\frac{{{a}{b}}}{{{c}}}",
            rf"\frac{{{a}\sqrt{{x}}}}{{{c}}}",
            f"{a * b**0.5 / c:.3f}",
        ],
    )


def _complex(rng: random.Random) -> Made:
    a, b = _draw(rng), _draw(rng)
    b += b == a
    return (
        f"{a}{_signed(b)}i",
        [f"{b}i{_signed(a)}", f"{a}{_signed(b)} i"],
        [
            f"{a}{_signed(-b)}i",
            f"{-a}{_signed(b)}i",
            f"{b}{_signed(a)}i",
            f"{a}{_signed(b)}",
            f"{a + b}i",
            f"{a}{_signed(b)}x",
        ],
    )


def _power(rng: random.Random) -> Made:
    a, n = _draw(rng), rng.randint(3, 12)
    return (
        f"{a}x^{{{n}}}",
        [f"{a}x^{n}", f"{a}*x**{n}", f"{a}x^{n - 1} x"],
        [
            f"{a}x^{{{n + 1}}}",
            f"{a}x^{{-{n}}}",
            f"{a}x",
            f"{a}{n}x",
            f"{-a}x^{{{n}}}",
            f"{a}t^{{{n}}}",
            f"{a}x_{{{n}}}",
        ],
    )


def _measure(rng: random.Random) -> Made:
    n = rng.randint(2, 500)
    unit, same, other = rng.choice(
        [
            ("cm", "centimeters", "m"),
            ("kg", "kilograms", "g"),
            ("hours", "hr", "minutes"),
            ("m^2", "square meters", "m^3"),
        ]
    )
    return (
        rf"{n}\text{{ {unit}}}",
        [f"{n}", f"{n} {same}", rf"{n}\ \mathrm{{{unit}}}"],
        [f"{n} {other}", f"{n + 1} {same}", f"{n} million {same}", f"{n}x", rf"{n}\%"],
    )


def _point(rng: random.Random) -> Made:
    a, b = _draw(rng), _draw(rng, 11, 19)
    return (
        f"({a}, {b})",
        [f"({a},{b})", rf"\left({a}, {2 * b}/2\right)"],
        [
            f"({b}, {a})",
            f"({a}, {-b})",
            f"({-a}, {b})",
            f"[{a}, {b}]",
            f"({a}, {b}]",
            f"({a}, {b}, 0)",
            f"({a + 1}, {b})",
        ],
    )


def _wave(rng: random.Random) -> Made:
    a, b, c = _draw(rng), rng.randint(2, 9), _draw(rng)
    return (
        rf"{a}\sin({b}x){_signed(c)}",
        [rf"{c}{_signed(a)}\sin {b}x", f"{a}*sin({b}*x){_signed(c)}", rf"{a}\cos({b}x-\pi/2){_signed(c)}"],
        [
            rf"{a}\cos({b}x){_signed(c)}",
            rf"{a}\sin({b + 1}x){_signed(c)}",
            rf"{-a}\sin({b}x){_signed(c)}",
            rf"{a}\sin({b}x){_signed(-c)}",
            rf"{a}\sin({b}t){_signed(c)}",
            rf"{a}\sin(x){_signed(c)}",
            rf"{a}\sin^2({b}x){_signed(c)}",
        ],
    )


def _curve(rng: random.Random) -> Made:
    a, b, c = rng.randint(2, 9), _draw(rng), _draw(rng, 11, 30)
    return (
        f"{a}x^2{_signed(b)}y^2={c}",
        [
            f"{b}y^2{_signed(a)}x^2={c}",
            f"{a}x^2{_signed(b)}y^2{_signed(-c)}=0",
            f"{3 * a}x^2{_signed(3 * b)}y^2={3 * c}",
        ],
        [
            f"{a}x^2{_signed(b)}y^2={c + 1}",
            f"{a}x^2{_signed(-b)}y^2={c}",
            f"{a + 1}x^2{_signed(b)}y^2={c}",
            f"{a}x^3{_signed(b)}y^2={c}",
            f"{a}x^2{_signed(b)}z^2={c}",
            f"{a}x^2{_signed(b)}y^2>{c}",
            f"{c}",
        ],
    )


def _bound(rng: random.Random) -> Made:
    a = _draw(rng, 2, 50)
    b = a + rng.randint(1, 9)
    return (
        f"{a} < x \\le {b}",
        [f"({a}, {b}]", f"{b} \\ge x > {a}", rf"x \in ({a}, {b}]"],
        [
            f"[{a}, {b}]",
            f"({a}, {b})",
            f"{a} < x < {b}",
            f"{a} < y \\le {b}",
            f"({a}, {b + 1}]",
            f"x > {a}",
            f"{a}, {b}",
        ],
    )


_CHANGES = (
    (r"(?<![\d.])[2-9](?![\d.])", lambda old: "9" if old == "8" else str(int(old) + 1)),
    (r"[xyzn](?![A-Za-z])", lambda old: "w"),
    (r"(?<=[\w)}]) ?\+ ?(?=[\w\\(])", lambda old: "-"),
    (r"(?<=[\w)}]) ?- ?(?=[\w\\(])", lambda old: "+"),
    (r"\\(?:sin|cos)", lambda old: r"\tan"),
    (r"\\sqrt(?=\{)", lambda old: ""),
)


def changed_truths() -> Iterator[Pair]:
    """Every hand-written task's own answer with one symbol changed, in every place where it matters."""
    for truth in right_answers():
        if re.search(r"million|Eq|[A-Za-z]{4,}\b(?<!frac)(?<!sqrt)", re.sub(r"\\[a-z]+", "", truth)):
            continue
        for pattern, change in _CHANGES:
            for found in re.finditer(pattern, truth):
                new = truth[: found.start()] + change(found.group()) + truth[found.end() :]
                yield Pair(truth, rf"\boxed{{{new}}}", False, "changed")
