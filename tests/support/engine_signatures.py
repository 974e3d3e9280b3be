"""What an engine's functions and classes look like: signatures, fields, and what is in their syntax trees.

For the contract tests. `owner` is a function, a class or a module, or the node of one (`defined`); patterns are Python
source. Comments, docstrings and line breaks do not matter: a pattern is compared with the nodes of the tree.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def defined(path: Path, name: str = "") -> Any:
    """What a file defines under a dotted name, for modules that cannot be imported here; "": the module."""
    found: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in filter(None, name.split(".")):
        kinds = ast.FunctionDef | ast.ClassDef
        found = next(node for node in found.body if isinstance(node, kinds) and node.name == part)
    return found


def _parse(owner: Any) -> ast.AST:
    if isinstance(owner, ast.AST):
        return owner
    return ast.parse(textwrap.dedent(inspect.getsource(owner)))


def _positions(owner: Any, pattern: str) -> list[tuple[int, int]]:
    """Line and column of every node that is this expression or statement."""
    (wanted,) = ast.parse(pattern).body
    node = wanted.value if isinstance(wanted, ast.Expr) else wanted
    found = [n for n in ast.walk(_parse(owner)) if type(n) is type(node) and ast.dump(n) == ast.dump(node)]
    return sorted((n.lineno, n.col_offset) for n in found if isinstance(n, ast.expr | ast.stmt))


def holds(owner: Any, pattern: str) -> bool:
    """Whether an expression (that is read, not assigned) or a statement is anywhere in the source."""
    return bool(_positions(owner, pattern))


def in_order(function: Any, patterns: Sequence[str]) -> bool:
    """Whether a function has all of these expressions, the first of each after the first of the one before."""
    found = [_positions(function, pattern) for pattern in patterns]
    return all(found) and [p[0] for p in found] == sorted(p[0] for p in found)


def assignments(owner: Any, target: str) -> list[str]:
    """What is assigned to a name or attribute, such as "self.backend", as source."""
    values = []
    for node in ast.walk(_parse(owner)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _annotated(node) else []
        values += [ast.unparse(node.value) for one in targets if ast.unparse(one) == target]
    return values


def _annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def returned(function: Any) -> list[str]:
    """What a function returns, as source, in the order of its lines."""
    found = [node for node in ast.walk(_parse(function)) if isinstance(node, ast.Return) and node.value]
    return [ast.unparse(node.value) for node in sorted(found, key=lambda node: node.lineno) if node.value]


def assigned(owner: Any) -> set[str]:
    """Attributes of self that a method, or any method of a class, assigns."""
    stored = [n for n in ast.walk(_parse(owner)) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def calls(owner: Any, name: str) -> list[str]:
    """How something of this name is called, as source."""
    found = [node for node in ast.walk(_parse(owner)) if isinstance(node, ast.Call)]
    return [ast.unparse(node) for node in found if ast.unparse(node.func).endswith(name)]


def fields(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def parameters(function: Any) -> list[str]:
    if isinstance(function, ast.FunctionDef):
        named = function.args
        return [one.arg for one in (*named.posonlyargs, *named.args, *named.kwonlyargs)]
    return list(inspect.signature(function).parameters)
