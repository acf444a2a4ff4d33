"""The text of a response without its Markdown: emphasis, headings, lists, tables, quotes, code, inline HTML, emoji.

Only the end of a response is read so, from the last line that can hold the answer. Formulas keep every character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

MAX_CHARS = 2000
"""So much of the end of a response is read as Markdown: more holds no answer, and parsers are slow on odd texts."""
_MARKS = re.compile(
    r"\*(?!\s)|(?<!\s)\*|^\s*\*|[_`>|~<\[&]|(?<!#)(?:#{1,3}|#{5,})(?!#)|^\s*[-+]\s|^\s*(?:-{2,}|={2,})\s*$|\\(?:[*_+#:-]|text[a-z]+\{)|[^\x00-\x7f]",
    re.M,
)
_BOLD = re.compile(r"(?<![\w*\\])\*\*(\w(?:[^*_`~<>\[\\$&#\n|]*[\w.:])?)\*\*(?=[\s.,]|\Z)")
"""The commonest mark, which needs no parser."""
_KEPT = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|\$(?=\S)[^$\n]*[^$\s]\$(?!\d)|####"
    r"|\\begin\{\w{1,20}\*?\}.*?\\end\{\w{1,20}\*?\}|\\[^\s*_+#`~-]|(?<=[\w)}])\*{1,2}(?=[\w({\\])",
    re.DOTALL,
)
"""Formulas, commands, products and GSM8K's mark."""
_ESCAPED = re.compile(r"\\(?=[:.!])(?![:!]\S)")
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_STYLED = re.compile(r"\\(?:textbf|textit|emph|underline)\{([^{}]*)\}")
_EXCLAIMED = re.compile(r"([*_`])!(?=\s|\Z)")
_STRUCK = re.compile(r"<!--.*?-->|<(s|del|strike)>.*?</\1>", re.DOTALL)
_BREAKING = re.compile(r"</?(?:br|p|div|tr|td|th|li|ul|ol|table|tbody|thead|h[1-6]|hr|pre|blockquote|center)\s?/?>")
_TAG = re.compile(
    r"</?(?:b|strong|i|em|u|span|mark|big|small|font|code|p|div|a|center|td|th|table|final|result|final_answer)"
    r"(?:\s[a-z-]{1,20}=[^<>]{0,200})?\s?/?>"
)
_ROW = re.compile(r"^[ \t]*\|[ \t].*[ \t]\|.*[ \t]\|[ \t]*$", re.M)
_SPELLINGS = str.maketrans(
    {
        **dict.fromkeys("→⇒⟹➜➔⟶⇨", "="),
        **dict.fromkeys("“”„«»", '"'),
        **dict.fromkeys("❌✗✘🚫❎👎", " wrong "),
        **dict.fromkeys("∴\ufe0f\u200d•·▪", " "),
    }
)
_FIRST_PICTURE = "\u2600"
_TASK = re.compile(r"\[[ xX]\]\s+")


def plain(text: str, markers: Sequence[str]) -> str:
    """The response with its end, from where its answer can stand, as plain lines."""
    start = _answer_begins(text, markers)
    end = text[start:]
    if _MARKS.search(end) is None:
        return text
    bare = _BOLD.sub(r"\1", end)
    return text[:start] + (_read(end) if _MARKS.search(bare) else bare)


def _answer_begins(text: str, markers: Sequence[str]) -> int:
    """The line of the last marker, or the last paragraph with a digit or formula."""
    lowered = text.casefold()
    if len(lowered) != len(text):
        lowered = text
    marked = max((lowered.rfind(marker.casefold()) for marker in markers), default=-1)
    if marked >= 0:
        start = text.rfind("\n", 0, marked) + 1
    else:
        said = re.match(r"(?s).*[\d$\])]", text)
        start = text.rfind("\n\n", 0, said.end() if said else len(text.rstrip())) + 1
    if len(text) - start > MAX_CHARS:
        start = text.find("\n", len(text) - MAX_CHARS) + 1 or len(text) - MAX_CHARS
    return start


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def _read(text: str) -> str:
    text = _PRIVATE.sub("", text)
    text = _EXCLAIMED.sub(r"\1.", _STYLED.sub(r"\1", text))
    if "<" in text:
        text = _TAG.sub("", _BREAKING.sub("\n", _STRUCK.sub(" ", text)))
    if not text.isascii():
        text = _without_pictures(text.translate(_SPELLINGS))
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found.group())
        return chr(0xE000 + len(kept) - 1)

    text = _KEPT.sub(keep, _ESCAPED.sub("", text))
    text = _ROW.sub(lambda row: row.group().strip(" \t|").replace(" | ", "\n\n"), text) if "---" not in text else text
    read = _lines(_parser().parse(text))
    # A reference such as &#xE005; may stand for one of these characters too, and for nothing that was kept.
    places = {chr(0xE000 + number): formula for number, formula in enumerate(kept)}
    return _PRIVATE.sub(lambda found: places.get(found.group(), ""), read).strip()


def _without_pictures(text: str) -> str:
    return "".join(
        " " if character >= _FIRST_PICTURE and unicodedata.category(character) == "So" else character
        for character in text
    )


def _lines(tokens: Sequence[Token]) -> str:
    said: list[str] = []
    items = sum(token.type == "list_item_open" for token in tokens)
    dash = ""
    for token in tokens:
        if token.type == "inline":
            text = _TASK.sub("", _inline(token.children or []), count=1)
            lonely = dash == "- " and items == 1 and len(said) == 0 and token.content[:1] in "0123456789.$"
            said.append(f"{dash}{text}" if lonely or dash != "- " else text)
            dash = ""
        elif token.type == "list_item_open":
            dash = f"{token.info}{token.markup} " if token.info or token.markup == "-" else ""
        elif token.type == "list_item_close":
            said += [dash.strip()] if dash.strip(" -") else []
            dash = ""
        elif token.type in ("fence", "code_block"):
            said.append(token.content.strip("\n"))
    return "\n".join(said)


def _inline(tokens: Sequence[Token]) -> str:
    said: list[str] = []
    struck = 0
    for token in tokens:
        if token.type in ("s_open", "s_close"):
            struck += token.nesting
        elif not struck and token.type in ("text", "code_inline", "text_special"):
            said.append(token.content)
        elif token.type in ("softbreak", "hardbreak"):
            said.append("\n")
    return "".join(said)
