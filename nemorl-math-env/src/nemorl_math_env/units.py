"""Units that may follow a number, and words that change the number they stand beside."""

from __future__ import annotations

import re
from functools import lru_cache


def word_set(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Canonical name -> spellings. A spelling may have several meanings; two units are equal if they share one.
_NAMES: dict[str, str] = {
    "dollar": "$ dollar usd buck",
    "euro": "€ euro eur",
    "pound sterling": "£ pound quid gbp",
    "cent": "¢ cent penny pennies",
    "rupee": "₹ rupee rs",
    "yen": "¥ yen",
    "percent": "% percent percentage pct",
    "degree": "° degree deg",
    "degree celsius": "° degree °c celsius",
    "degree fahrenheit": "° degree °f fahrenheit",
    "radian": "radian rad",
    "metre": "m metre meter",
    "kilometre": "km kilometre kilometer",
    "centimetre": "cm centimetre centimeter",
    "millimetre": "mm millimetre millimeter",
    "micrometre": "micrometre micrometer micron",
    "nanometre": "nm nanometre nanometer",
    "inch": "in inch",
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "gram": "g gram gm",
    "kilogram": "kg kilogram kilo",
    "milligram": "mg milligram",
    "tonne": "t ton tonne",
    "pound": "lb lbs pound",
    "ounce": "oz ounce",
    "litre": "l litre liter",
    "millilitre": "ml millilitre milliliter",
    "gallon": "gal gallon",
    "quart": "qt quart",
    "pint": "pt pint",
    "cup": "cup",
    "tablespoon": "tbsp tablespoon",
    "teaspoon": "tsp teaspoon",
    "second": "s sec second",
    "millisecond": "ms millisecond",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week wk",
    "month": "month",
    "year": "year yr",
    "acre": "acre",
    "hectare": "ha hectare",
    "hertz": "hz hertz",
    "newton": "n newton",
    "joule": "j joule",
    "kilojoule": "kj kilojoule",
    "watt": "w watt",
    "kilowatt": "kw kilowatt",
    "volt": "v volt",
    "ampere": "a amp ampere",
    "ohm": "ohm",
    "pascal": "pa pascal",
    "mole": "mol mole",
    "kelvin": "k kelvin",
    "calorie": "cal calorie",
    "bit": "bit",
    "byte": "byte",
    "miles per hour": "mph",
    "kilometres per hour": "kmh kph kmph",
    "unit": "unit",
}
_COUNTED = word_set(
    """
    apple orange banana egg cookie cake pie slice piece book page pen pencil paper letter stamp card ticket coin
    marble toy ball box bag bottle can jar basket crate pack packet pair game point goal match win vote question
    problem test student pupil teacher child children boy girl man men woman women person people guest friend
    player worker employee customer passenger member family dog cat fish bird cow horse sheep chicken animal
    tree flower plant rose leaf leaves car truck bus bike bicycle train plane trip lap round step stair floor
    room house window door chair table desk shirt shoe sock hat dress item object thing block brick tile stone
    bean candy candies sweet chocolate pizza sandwich burger meal glass plate bowl spoon number digit solution
    root side edge vertex vertices face way time turn move song photo picture video movie episode class lesson
    course shelf shelves row column seat clip bead ribbon rope string bead sticker balloon shell seed carrot
    potato potatoes tomato tomatoes muffin cupcake donut brownie sheet inhabitant integer triangle square circle
    arrangement combination permutation possibility possibilities outcome team
    """
)
_FACTORS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3}
_LETTERS = "mgsL"
"""Units of a single letter that count as plain letters apart from the number (``5 m``, not ``5m``); others as text."""

MAX_UNIT_CHARS = 60
"""Longer than this is no unit; each ``/`` and ``square`` of one is read by a call of its own."""

MODIFIERS = word_set(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand
    thousands million millions billion billions trillion trillions quadrillion dozen dozens score gross myriad
    half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth
    eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth millionths first
    second. double triple twice thrice couple plus minus times over divided multiplied by squared cubed
    factorial power root mod modulo negative positive more less fewer greater least most than or and nor but to
    between under above below up about approximately around almost nearly roughly before after until till past
    not no never none neither except other another wrong false incorrect unlike without instead am pm noon
    midnight bc ad all each every some any few many several
    """
)
"""Words that make another number of the one beside them, or deny it. They are never units."""

MULTIPLIERS = {
    **{"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
    **{"hundreds": 100, "thousands": 1000, "millions": 10**6, "billions": 10**9, "trillions": 10**12, "dozens": 12},
}

Unit = frozenset[str]
NONE: Unit = frozenset()


def _spellings() -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for name, spellings in _NAMES.items():
        for spelling in spellings.split():
            plurals = {spelling, f"{spelling}s", f"{spelling}es"} if len(spelling) > 2 else {spelling}
            for form in plurals:
                table.setdefault(form, set()).add(name)
    for noun in _COUNTED:
        for form in (noun, f"{noun}s", f"{noun}es"):
            table.setdefault(form, set()).add(noun)
    return table


_TABLE = _spellings()
_POWER = re.compile(r"(.+?)\s*\^\s*\{?\s*([23])\s*\}?")


@lru_cache(maxsize=4096)
def read_unit(text: str, *, apart: bool, compound: bool = False) -> Unit | None:
    r"""The meanings of a unit: ``cm``, ``square feet``, ``km/h``, ``\text{m}^2``; ``None`` if it is none.

    Args:
        text: What follows the number.
        apart: A space stood between, which single letters need.
        compound: It is part of a unit such as ``m/s``, in which single letters are clear.
    """
    text = text.strip().rstrip(".")
    if len(text) > MAX_UNIT_CHARS:
        return None
    if "/" in text or " per " in text:
        above, _, below = text.replace(" per ", "/").partition("/")
        over = read_unit(above.strip(), apart=apart, compound=True)
        under = read_unit(below.strip(), apart=True, compound=True)
        if not over or not under:
            return None
        return frozenset(f"{a}/{b}" for a in over for b in under) | _speeds(over, under)
    power = _POWER.fullmatch(text)
    if power:
        base = read_unit(power.group(1), apart=apart, compound=compound)
        return None if not base else frozenset(f"{name}^{power.group(2)}" for name in base)
    first, _, rest = text.partition(" ")
    if rest and first.casefold() in _FACTORS:
        base = read_unit(rest, apart=True)
        return None if not base else frozenset(f"{name}^{_FACTORS[first.casefold()]}" for name in base)
    return _name(text, single=compound or (apart and text in _LETTERS))


def _name(text: str, *, single: bool) -> Unit | None:
    as_text = re.fullmatch(r"\\text\{([A-Za-z])\}", text)
    if as_text:
        text = as_text.group(1)
    elif len(text) == 1 and text.isalpha() and not single:
        return None
    scale = re.fullmatch(r"(?:°|degrees?)\s*(c|f)(?:elsius|ahrenheit)?", text, re.IGNORECASE)
    if scale:
        return frozenset({"degree celsius" if scale.group(1) in "cC" else "degree fahrenheit"})
    meanings = _TABLE.get(text.casefold())
    return None if meanings is None else frozenset(meanings)


def _speeds(over: Unit, under: Unit) -> Unit:
    if "hour" in under:
        return frozenset(f"{name}s per hour" for name in over & {"mile", "kilometre"})
    return NONE
