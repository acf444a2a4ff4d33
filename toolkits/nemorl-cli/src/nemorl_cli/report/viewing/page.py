"""The page: one program in two settings, served beside its data, or a single file with its data inside.

It is made of assets/page/*.js, ES modules that name their imports on one line each; they are joined into one script, so
that the file needs no module loader. Nothing that a run says is ever part of the markup: it is data, and the script
shows it as text. In a single file it is JSON without ``<``, ``>`` and ``&``, in a script element that is not run; and
the page's own policy lets no script run but ours, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from nemorl_cli.report.viewing.overview import JSON

MODULES = (
    "dom",
    "colours",
    "source",
    "media",
    "charts",
    "about",
    "curves",
    "tokens",
    "transcript",
    "samples",
    "timeline",
    "settings",
    "main",
)
"""In the order in which they are joined: what a module imports stands before it."""
_IMPORT = re.compile(r'^import .* from "\./[a-z]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
DATA = "data"
"""Id of the element that holds a single file's data."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the served page."""


@cache
def script() -> str:
    """The page's script, with the chart library."""
    modules = "\n".join(_EXPORT.sub("", _IMPORT.sub("", _asset(f"page/{name}.js"))) for name in MODULES)
    return f'{_asset("uplot.min.js")}\n"use strict";\n(() => {{\n{modules}\n}})();\n'


@cache
def style() -> str:
    """The page's style sheet, with that of the chart library."""
    return f"{_asset('uplot.min.css')}\n{_asset('page/page.css')}"


def served() -> str:
    """The page that asks its server for data, beside ``page.js`` and ``page.css``."""
    head = '<link rel="stylesheet" href="page.css">'
    return _page("nemorl", head, '<script src="page.js"></script>')


def single_file(title: str, data: dict[str, Any]) -> str:
    """The page with its data inside.

    Args:
        title: Of the browser's tab.
        data: What ``source.js`` says it reads.
    """
    code = script()
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; script-src 'sha256-{digest}'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style()}</style>'
    body = f'<script type="application/json" id="{DATA}">{inert(data)}</script>\n<script>{code}</script>'
    return _page(title, head, body)


def inert(data: Any) -> str:
    """JSON that ends no element and begins none, whatever it holds."""
    text = json.dumps(data, ensure_ascii=True, **JSON)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page(title: str, head: str, body: str) -> str:
    shown = re.sub(r"[&<>\"']", lambda found: f"&#{ord(found[0])};", title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
{head}
<title>{shown} · nemorl</title>
</head>
<body>
<noscript><p>This page draws a run with JavaScript, which is off. The numbers are in metrics.jsonl.</p></noscript>
<div id="app"></div>
{body}
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files("nemorl_cli.report") / "assets" / name).read_text(encoding="utf-8")
