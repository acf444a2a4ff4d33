"""A counterexample as a test that stands alone: the loss, the batch, and the source of the clause that it breaks."""

from __future__ import annotations

import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from nemorl_tensors import TokenBatch
from torch import Tensor

IMPORTS: Mapping[str, str] = {
    "copy": "import copy",
    "math": "import math",
    "pickle": "import pickle",
    "Callable": "from collections.abc import Callable",
    "Sequence": "from collections.abc import Sequence",
    "replace": "from dataclasses import replace",
    "Any": "from typing import Any",
    "torch": "import torch",
    "Metric": "from nemorl.metrics import Metric",
    "merge": "from nemorl.metrics import merge",
    "values": "from nemorl.metrics import values",
    "TokenBatch": "from nemorl_tensors import TokenBatch",
    "Tensor": "from torch import Tensor",
    "TorchFunctionMode": "from torch.overrides import TorchFunctionMode",
}
"""What clauses import, by the names that they use."""


def test_source(
    clause: Callable[..., None], loss: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """A Python file with one test, which fails as the clause does.

    Args:
        clause: ``(loss, *arguments, **options)``.
        loss: What breaks it.
        arguments: Tensors and batches, by the names of the clause's parameters.
        options: Plain keywords.
    """
    loss_imports, made = construction(loss)
    parts = [inspect.getsource(part) for part in [*_helpers(clause), clause]]
    given = "".join(_assignment(name, value) for name, value in arguments.items())
    passed = ", ".join(["loss", *arguments, *(f"{name}={value!r}" for name, value in options.items())])
    test = f"def test_{clause.__name__}() -> None:\n    loss = {made}\n{given}    {clause.__name__}({passed})\n"
    body = "\n\n".join([*parts, test])
    needed = [line for name, line in IMPORTS.items() if re.search(rf"\b{name}\b", body)]
    constants = "".join(f"{name} = {value!r}\n" for name, value in _constants(parts, clause).items())
    head = "\n".join(dict.fromkeys([*needed, *loss_imports]))
    return f"{head}\n\n{constants}\n{body}"


def construction(loss: Any) -> tuple[list[str], str]:
    """Import lines, and the expression that makes the loss: of a dataclass, with the fields that are not defaults."""
    if inspect.isfunction(loss):
        return [_import_of(loss)], loss.__name__
    kind = type(loss)
    lines, given = [_import_of(kind)], []
    if not is_dataclass(loss):
        return lines, f"{kind.__name__}()"
    for one in fields(loss):
        value = getattr(loss, one.name)
        is_nameless = inspect.isfunction(value) and "<" in value.__qualname__
        if not one.init or is_nameless or _is_default(one, value):
            continue
        more, text = _expression(value)
        lines += more
        given.append(f"{one.name}={text}")
    return lines, f"{kind.__name__}({', '.join(given)})"


def _expression(value: Any) -> tuple[list[str], str]:
    if is_dataclass(value) and not isinstance(value, type):
        return construction(value)
    if isinstance(value, type) or inspect.isfunction(value):
        return [_import_of(value)], value.__name__
    return [], repr(value)


def _is_default(one: Any, value: Any) -> bool:
    made = one.default_factory() if callable(one.default_factory) else one.default
    return type(made) is type(value) and bool(made == value)


def _import_of(named: Any) -> str:
    return f"from {named.__module__} import {named.__name__}"


def _helpers(function: Callable[..., Any]) -> list[Any]:
    """Functions and classes of the certificate that a function names, those first that others use."""
    found: dict[str, Any] = {}

    def visit(source: Any) -> None:
        module = sys.modules[source.__module__]
        for name in re.findall(r"\b[A-Za-z_]\w*\b", inspect.getsource(source)):
            named = vars(module).get(name)
            is_ours = getattr(named, "__module__", "").startswith("nemorl_testing.losses")
            if is_ours and named is not source and name not in found and named is not function:
                visit(named)
                found[name] = named

    visit(function)
    return list(found.values())


def _constants(sources: Sequence[str], clause: Callable[..., None]) -> dict[str, float]:
    module = vars(sys.modules[clause.__module__])
    names = dict.fromkeys(re.findall(r"\b[A-Z][A-Z_]+\b", "\n".join(sources)))
    return {name: module[name] for name in names if isinstance(module.get(name), (int, float))}


def _assignment(name: str, value: Any) -> str:
    text = batch_source(value) if isinstance(value, TokenBatch) else tensor_source(value)
    return textwrap.indent(f"{name} = {text}\n", "    ")


def tensor_source(values: Tensor) -> str:
    return f"torch.tensor({_listed(values.tolist())})"


def _listed(values: Any) -> str:
    if isinstance(values, list):
        return f"[{', '.join(map(_listed, values))}]"
    if isinstance(values, float):
        is_plain = math.isfinite(values)
        return f"{float(f'{values:.6g}')!r}" if is_plain else f'float("{values}")'
    return repr(values)


def batch_source(batch: TokenBatch) -> str:
    """The expression that makes a batch, over several lines."""
    lengths = batch.lengths.tolist()
    ids = _listed([part.tolist() for part in torch.split(batch.token_ids, lengths)])
    masks = _listed([part.tolist() for part in torch.split(batch.mask, lengths)])
    options = "" if batch.loss_aggregation == "token" else f", loss_aggregation={batch.loss_aggregation!r}"
    if batch.sequences_per_group > 1:
        options += f", sequences_per_group={batch.sequences_per_group}"
    made = f"TokenBatch.from_sequences(\n    {ids},\n    {masks}{options},\n)"
    for method, given in (("with_tokens", batch.token_fields), ("with_sequences", batch.sequence_fields)):
        if given:
            lines = "".join(f"    {name}={tensor_source(value)},\n" for name, value in given.items())
            made += f".{method}(\n{lines})"
    return made
