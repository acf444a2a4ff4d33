"""Writes the parts of ``docs/plugin-kinds/*.md`` that follow from the code: contracts and conformance checks.

    python docs/generate_kinds.py            fill in the pages
    python docs/generate_kinds.py --check    exit 1 if a page is not what would be written

A page marks each part with ``<!-- generated: NAME -->`` and ``<!-- end -->``; what is outside the marks is written by
hand. ``docs/plugins.md`` has the parts that all kinds share.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from nemorl import contracts
from nemorl.config import RunConfig
from nemorl.contracts import RequestBackend
from nemorl.contracts.environment import Environment
from nemorl.plugins import KINDS, kinds
from nemorl.trainer import BaseTrainer
from nemorl_cli.report import run_data
from nemorl_cli.report import sections as report_sections
from nemorl_testing.kit import Check, checks_for

DOCS = Path(__file__).resolve().parent
PART = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHARED_CHECKS = ("entry_points", "every_config")
"""Modules of checks that many kinds share."""
_ARGUMENT = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.MULTILINE)
TRAINER = (
    "batch_size",
    "train_step",
    "rollout_plan",
    "setup",
    "validate",
    "planned_updates",
    "state_dict",
    "load_state_dict",
)
"""What an algorithm defines or may define; the rest of ``BaseTrainer`` is for it to call."""


def parts() -> Mapping[str, Callable[[], str]]:
    """Every generated part by name."""
    found: dict[str, Callable[[], str]] = {
        "data of PluginConfig": lambda: class_data(kinds.PluginConfig),
        "data of RunConfig": lambda: class_data(RunConfig),
        "verbs of BaseTrainer": lambda: verbs(BaseTrainer, TRAINER),
        "verbs of Environment": lambda: verbs(Environment) + "\n" + verbs(contracts.Episode),
        "verbs of Loss": lambda: verbs(contracts.Loss),
        "verbs of RequestBackend": lambda: verbs(RequestBackend),
        "report sections": lambda: "\n".join(map(fields, _REPORT_TYPES)),
        "checks of configs": lambda: checks([c for c in checks_for("datasets") if _module(c) in SHARED_CHECKS]),
    }
    for kind in ("TrainingBackend", "GenerationBackend", "WeightTransport", "Logger"):
        found[f"verbs of {kind}"] = lambda kind=kind: verbs(getattr(contracts, kind))  # type: ignore[misc]
    for kind in (
        *("TrainingBackend", "GenerationBackend", "Environment", "Dataset", "Logger", "WeightTransport"),
        *("Hook", "ReportSection"),
    ):
        base = getattr(kinds, f"{kind}Config")
        found[f"data of {kind}Config"] = lambda base=base: class_data(base)  # type: ignore[misc]
        found[f"build of {kind}Config"] = lambda base=base: verbs(base)  # type: ignore[misc]
    for kind in KINDS:
        found[f"checks of {kind}"] = lambda kind=kind: own_checks(kind)  # type: ignore[misc]
    return found


_REPORT_TYPES = (
    report_sections.Section,
    report_sections.Text,
    report_sections.Table,
    report_sections.Curves,
    run_data.RunData,
)


def own_checks(kind: str) -> str:
    """The checks of a kind that not every plugin has."""
    return checks([check for check in checks_for(kind) if _module(check) not in SHARED_CHECKS])


def checks(found: Sequence[Check]) -> str:
    lines = ["| check | clause | design |", "|---|---|---|"]
    for check in found:
        clause = _prose(re.sub(r" \(DESIGN [\d.]+\)$", "", check.clause)).replace("|", r"\|")
        name = f"`{check.name}`{' (slow)' if check.is_slow else ''}"
        lines.append(f"| {name} | {clause} | {check.section} |")
    return "\n".join(lines) + "\n"


def _module(check: Check) -> str:
    return check.function.__module__.rpartition(".")[2]


def class_data(owner: type) -> str:
    """A table of what a config class says about itself."""
    lines = ["| class data | unless set | meaning |", "|---|---|---|"]
    for name, annotation, default, text in _assignments(owner):
        if annotation.startswith("ClassVar"):
            lines.append(f"| `{name}` | {f'`{default}`' if default else ''} | {_prose(text)} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "It has no class data of its own.\n"


def fields(owner: type) -> str:
    """A dataclass with its fields as a list."""
    found = [(name, annotation, text) for name, annotation, _, text in _assignments(owner)]
    summary = (owner.__doc__ or "").partition("\n\n")[0]
    lines = [f"`{owner.__name__}`: {_lower_first(_prose(summary))}\n"]
    lines += [f"- `{name}: {kind}`{f': {_lower_first(_prose(text))}' if text else ''}" for name, kind, text in found]
    return "\n".join(lines) + "\n"


def verbs(owner: type, only: Sequence[str] = ()) -> str:
    """The methods of a class as signatures, then what each promises."""
    chosen = [(name, *found) for name, found in _methods(owner).items() if not only or name in only]
    chosen.sort(key=lambda method: only.index(method[0]) if only else 0)
    code = f"class {owner.__name__}:\n" + textwrap.indent("\n".join(lines for _, lines, _ in chosen), "    ")
    promises = [f"- `{name}`: {_promise(text)}" for name, _, text in chosen if text]
    return "\n\n".join([f"```python\n{code}\n```", *(["\n".join(promises)] if promises else [])]) + "\n"


def _methods(owner: type) -> dict[str, tuple[str, str]]:
    """name -> (signature as in the source, docstring) of what others call or define. A trainer has bases that count."""
    owners = (
        [base for base in owner.__mro__ if base.__module__.startswith("nemorl.")] if owner is BaseTrainer else [owner]
    )
    found = {}
    for base in reversed(owners):
        lines = textwrap.dedent(inspect.getsource(base)).splitlines()
        for method in _tree(base).body:
            is_public = isinstance(method, ast.FunctionDef) and (method.name[0] != "_" or method.name == "__call__")
            if isinstance(method, ast.FunctionDef) and is_public:
                found[method.name] = _signature(method, lines), ast.get_docstring(method) or ""
    return found


def _signature(method: ast.FunctionDef, lines: Sequence[str]) -> str:
    first = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)])
    last = method.body[0].lineno
    text = textwrap.dedent("\n".join(lines[first - 1 : last - 1]) or lines[first - 1])
    return text if text.endswith("...") else f"{text} ..."


def _promise(docstring: str) -> str:
    """What a method promises: its docstring, with the arguments as a list of their own."""
    text, _, arguments = docstring.partition("\n\nArgs:\n")
    arguments = textwrap.dedent(arguments.partition("\n\n")[0])
    listed = [f"    - `{name}`: {_lower_first(_prose(meaning))}" for name, meaning in _ARGUMENT.findall(arguments)]
    return "\n".join([_lower_first(_prose(text)), *listed])


def _assignments(owner: type) -> Iterator[tuple[str, str, str, str]]:
    """(name, annotation, default, docstring) of each annotated assignment."""
    body = _tree(owner).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            default = ast.unparse(statement.value).replace("'", '"') if statement.value else ""
            yield statement.target.id, ast.unparse(statement.annotation), default, str(text)


def _tree(owner: type) -> ast.ClassDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    return tree


def _prose(text: str) -> str:
    """A docstring on one line: reStructuredText literals as Markdown code."""
    plain = re.sub(r":class:`([^`]+)`", r"`\1`", text.replace("``", "`"))
    return " ".join(plain.split())


def _lower_first(text: str) -> str:
    is_word = text[1:2].islower() or text[1:2] == " "
    return text[:1].lower() + text[1:] if is_word else text


def filled_in(text: str) -> str:
    """A page with its generated parts as they should be."""
    known = parts()

    def part(found: re.Match[str]) -> str:
        return f"{found[1]}\n{known[found['name']]()}\n{found[3]}"

    return PART.sub(part, text)


def pages() -> list[Path]:
    return [DOCS / "plugins.md", *sorted((DOCS / "plugin-kinds").glob("*.md"))]


if __name__ == "__main__":
    from pages import update

    sys.exit(update({page: filled_in(page.read_text("utf-8")) for page in pages()}))
