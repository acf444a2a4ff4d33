"""What a row's assert statements need of the program, found without running them.

The judge runs tests in a process of its own and calls the program's functions through a pipe, so a test must be
expressible as calls with plain data. Here is which names are the program's, and which tests are refused.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nemorl.errors import DataError

MAX_TEST_CHARS = 200_000
MODULE = "solution"
"""The program, where a test imports from it."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
CONTAINS = (ast.In, ast.NotIn)
PLAIN_ATTRIBUTES = frozenset().union(
    *(dir(kind) for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range))
)
FILLS = {"append", "extend", "insert", "add", "update", "setdefault"}
"""Methods of plain data that take something in and check nothing."""
CAPTURES = {"redirect_stdout", "redirect_stderr", "capsys", "monkeypatch", "mock", "patch", "MagicMock"}
"""Names of what looks at, or changes, the inside of the process that a program runs in."""


@dataclass(frozen=True)
class Test:
    """One statement, or several, for the judge."""

    source: str
    names: tuple[str, ...]
    """Of the program, that it uses."""
    classes: tuple[str, ...]
    """Those of them that may return objects, to be used or passed on."""
    links: tuple[str, ...]
    """Attributes of the program's objects that may be objects in turn: ``left`` of ``root.left.right``."""
    uses_results: bool
    """Variables of earlier tests that hold what the program returned."""
    counts: bool
    """It is no mere set-up: it checks something that depends on the program."""


class _InexpressibleError(Exception):
    """Why a test cannot be judged."""


@lru_cache(maxsize=4096)
def analyze(sources: tuple[str, ...], where: str) -> tuple[Test, ...]:
    """The tests of a row.

    Args:
        sources: Python code, in order; later ones see the names of those before them.
        where: The row, for the error.

    Raises:
        DataError: a test is no Python, cannot be expressed with plain data, or none depends on the program.
    """
    trees = []
    for index, source in enumerate(sources):
        try:
            trees.append(_parse(source))
        except _InexpressibleError as error:
            raise _refusal(where, index, source, str(error)) from None
    own: set[str] = set()
    foreign = _names_of_all(trees)
    derived: set[str] = set()
    changed: set[str] = set()
    mentioned = _mentioned(trees)
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    tests = []
    for index, (tree, source) in enumerate(zip(trees, sources, strict=True)):
        own |= _bound(tree)
        names = foreign[index]
        classes = _classes(trees, names)
        try:
            _check_arguments(tree, set(names), defined)
            _check(tree, names, classes, {variable for other in trees for variable in _made_by(other, classes)})
        except _InexpressibleError as error:
            raise _refusal(where, index, source, str(error)) from None
        executed = [node for node in tree.body if not isinstance(node, DEFINITIONS)]
        used = _reached(_mentions(tree), mentioned)
        uses_results = bool(used & (derived | changed))
        if names or uses_results:
            derived |= _bound(tree)
            changed |= _changed(executed, set(names), mentioned)
        ran = {name for part in executed for name in _mentions(part)}
        program = set(names) | (derived - defined)
        counts = bool(ran & (set(names) | derived | changed)) and any(_checks(part, program) for part in executed)
        keeps = classes | _passed_on(tree, set(names))
        tests.append(
            Test(_with_imports(tree), names, tuple(sorted(keeps)), tuple(sorted(_links(tree))), uses_results, counts)
        )
    if not any(test.counts for test in tests):
        raise _refusal(where, len(sources) - 1, sources[-1], "no test checks what the program does")
    return tuple(tests)


def _mentions(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _mentioned(trees: Sequence[ast.Module]) -> dict[str, set[str]]:
    """Variables, functions and classes of the tests -> the names in the code of those that have code."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        found = {**{name: set[str]() for name in _bound(tree) - imported}, **found}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = found.get(node.name, set()) | _mentions(node)
    return found


def _reached(names: set[str], mentioned: dict[str, set[str]]) -> set[str]:
    """These names, and those in the code of the functions and classes among them, and so on."""
    found, new = set(names), set(names)
    while new:
        new = {inner for name in new for inner in mentioned.get(name, ())} - found
        found |= new
    return found


def _changed(executed: Sequence[ast.stmt], program: set[str], mentioned: dict[str, set[str]]) -> set[str]:
    """Variables of the tests that these statements may put something into: ``xs.append(f(1))``.

    The program cannot change what it is given, since that is a copy; nor does what an assertion compares change.
    """
    used: set[str] = set()
    for part in executed:
        given = [a for n in ast.walk(part) if isinstance(n, ast.Call) and _calls(n, program) for a in n.args]
        read = {node for argument in given for node in ast.walk(argument)}
        compared = [node for node in ast.walk(part) if isinstance(node, ast.Compare)]
        read |= {side for node in compared for side in (node.left, *node.comparators)}
        used |= {n.id for n in ast.walk(part) if isinstance(n, ast.Name) and n not in read}
    return {name for name in _reached(used, mentioned) if name in mentioned}


def _checks(tree: ast.AST, program: set[str]) -> bool:
    """It asserts, raises, or calls what may do so: a function of the tests or of a library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in FILLS:
                continue
            while isinstance(called, ast.Attribute | ast.Call | ast.Subscript):
                called = called.func if isinstance(called, ast.Call) else called.value
            if isinstance(called, ast.Name) and called.id not in program and called.id not in dir(builtins):
                return True
    return False


def _refusal(where: str, index: int, source: str, why: str) -> DataError:
    return DataError(
        f"{where} test {index} cannot be judged: {why}: {source.strip()!r:.200}",
        fix="write tests as calls of the program's functions with plain data (numbers, strings, bytes, lists, tuples, "
        "dicts, sets, None) that compare what is returned, use input/output pairs, or drop the row",
    )


def _parse(source: str) -> ast.Module:
    if len(source) > MAX_TEST_CHARS:
        raise _InexpressibleError(f"it has {len(source)} characters, more than {MAX_TEST_CHARS}")
    try:
        tree = ast.parse(source)
        symtable.symtable(ast.unparse(tree), "<test>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _InexpressibleError(f"it is no Python ({error})") from None
    return tree


# Names


def _names_of_all(trees: Sequence[ast.Module]) -> list[tuple[str, ...]]:
    """The program's names in each test."""
    imported = {name for tree in trees for name in _take_imports(tree)}
    bound: set[str] = set()
    found = []
    for tree in trees:
        bound |= _bound(tree)
        found.append((_globals_used(tree) - bound - set(dir(builtins)) - _modules(tree)) | (imported & _loads(tree)))
    if not any(found):
        # `assert sum(10, 15) == 6`: a program may be asked for a function that is named like a built-in one.
        found = [{name for name in _asserted_calls(tree) if name in dir(builtins)} - bound for tree in trees]
    return [tuple(sorted(names)) for names in found]


def _take_imports(tree: ast.Module) -> Iterator[str]:
    """Remove ``from solution import …`` and tell the names."""
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == MODULE and all(a.asname is None for a in node.names):
            yield from (alias.name for alias in node.names if alias.name != "*")
        else:
            kept.append(node)
    tree.body = kept


def _globals_used(tree: ast.Module) -> set[str]:
    """Names that the code reads and that are neither parameters nor local variables."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    return set(walk(symtable.symtable(ast.unparse(tree), "<test>", "exec")))


def _bound(tree: ast.Module) -> set[str]:
    """Names that the code gives to something itself, at its top level."""
    table = symtable.symtable(ast.unparse(tree), "<test>", "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def _loads(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _modules(tree: ast.Module) -> set[str]:
    """Modules of the standard library that a test uses without importing them: the judge does it."""
    return {base.id for base in _bases(tree) if base.id in sys.stdlib_module_names}


def _bases(tree: ast.AST) -> Iterator[ast.Name]:
    """Names whose attributes are used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value


def _with_imports(tree: ast.Module) -> str:
    missing = sorted((_modules(tree) & _globals_used(tree)) - _bound(tree))
    return "".join(f"import {name}\n" for name in missing) + ast.unparse(tree)


def _asserted_calls(tree: ast.Module) -> Iterator[str]:
    """Functions whose results are asserted right away."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            subject = node.test.left if isinstance(node.test, ast.Compare) else node.test
            if isinstance(subject, ast.Call) and isinstance(subject.func, ast.Name):
                yield subject.func.id


# Objects


def _classes(trees: Sequence[ast.Module], names: Sequence[str]) -> set[str]:
    """Capitalized names of the program whose own attributes, or those of what they return, are used."""
    return {name for name in names if name[0].isupper() and any(_attributes_of(tree, name, trees) for tree in trees)}


def _attributes_of(tree: ast.Module, name: str, trees: Sequence[ast.Module]) -> bool:
    variables = {name} | {variable for other in trees for variable in _made_by(other, {name})}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            (isinstance(node.value, ast.Name) and node.value.id in variables) or _calls(node.value, {name})
        ):
            return True
    return False


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _made_by(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Variables that are given the result of a call of one of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _calls(node.value, names):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _passed_on(tree: ast.Module, names: set[str]) -> set[str]:
    """Capitalized names that are called within the arguments of a call: ``longest([Pair(1, 2), Pair(3, 4)])``."""
    arguments = (
        part
        for node in ast.walk(tree)
        if _calls(node, names)
        for part in ast.iter_child_nodes(node)
        if node is not part
    )
    return {
        node.func.id
        for argument in arguments
        for node in ast.walk(argument)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and node.func.id[0].isupper()
    }


def _links(tree: ast.Module) -> set[str]:
    return {
        node.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.attr not in PLAIN_ATTRIBUTES
    }


# What cannot be said


def _check(tree: ast.Module, names: Sequence[str], classes: set[str], objects: set[str]) -> None:
    program = set(names)
    for node in ast.walk(tree):
        _check_uses(node, program)
        _check_attribute(node, program, classes)
        _check_comparison(node, classes, objects)
    for statement in tree.body:
        _check_in_place(statement, program - classes)


def _check_uses(node: ast.AST, program: set[str]) -> None:
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) or (
        isinstance(node, ast.Name) and node.id == "asyncio"
    ):
        raise _InexpressibleError("it is asynchronous")
    if (isinstance(node, ast.Name) and node.id in CAPTURES) or (isinstance(node, ast.alias) and node.name in CAPTURES):
        raise _InexpressibleError("it looks into the program's process")
    if isinstance(node, ast.ImportFrom | ast.Import):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if MODULE in modules:
            raise _InexpressibleError(f"only `from {MODULE} import name` can be understood of imports of the program")
        if "unittest.mock" in modules:
            raise _InexpressibleError("it looks into the program's process")
    if isinstance(node, ast.ClassDef) and program & {n for base in node.bases for n in _loads(base)}:
        raise _InexpressibleError("a class derives from one of the program")
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and program & {
        n for d in node.decorator_list for n in _loads(d)
    }:
        raise _InexpressibleError("it decorates with a function of the program")
    if isinstance(node, ast.ExceptHandler) and node.type is not None and program & _loads(node.type):
        raise _InexpressibleError("it catches an exception class of the program; built-in exceptions can be caught")
    if _calls(node, {"isinstance", "issubclass"}):
        assert isinstance(node, ast.Call)
        if len(node.args) == 2 and program & _loads(node.args[1]):
            raise _InexpressibleError("it asks for a class of the program")


def _check_arguments(tree: ast.Module, program: set[str], defined: set[str]) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _calls(node, program):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(argument, ast.Lambda) or (isinstance(argument, ast.Name) and argument.id in defined):
                    raise _InexpressibleError("an argument is a function, which is no plain data")


def _check_attribute(node: ast.AST, program: set[str], classes: set[str]) -> None:
    if not isinstance(node, ast.Attribute):
        return
    base = node.value
    if isinstance(base, ast.Name) and base.id in program - classes:
        raise _InexpressibleError(f"it uses {base.id}.{node.attr}, but {base.id} is not imported and is no class")
    if (
        isinstance(base, ast.Name)
        and base.id == "sys"
        and node.attr in ("stdin", "stdout", "stderr", "modules", "argv")
    ):
        raise _InexpressibleError("it looks into the program's process")
    if _calls(base, program - classes) and node.attr not in PLAIN_ATTRIBUTES:
        raise _InexpressibleError(f"plain data has no attribute {node.attr}")


def _check_comparison(node: ast.AST, classes: set[str], objects: set[str]) -> None:
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        contained = [part for op, part in zip(node.ops, node.comparators, strict=True) if not isinstance(op, CONTAINS)]
        sides = [node.left, *contained]
    elif isinstance(node, ast.Assert):
        sides = [node.test]
    for side in sides:
        if _calls(side, classes) or (isinstance(side, ast.Name) and side.id in objects):
            raise _InexpressibleError("it compares an object of the program, not plain data")


def _check_in_place(statement: ast.stmt, functions: set[str]) -> None:
    """Arguments travel as copies, so ``sort(xs)`` leaves the test's ``xs`` as it was."""
    if not isinstance(statement, ast.Expr) or not _calls(statement.value, functions):
        return
    assert isinstance(statement.value, ast.Call)
    if any(isinstance(argument, ast.Name) for argument in statement.value.args):
        raise _InexpressibleError("it calls a function for what it does to its argument, which is a copy")
