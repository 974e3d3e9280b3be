"""What an engine's functions and classes look like: signatures, fields, attributes, calls; for the contract tests."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any


def _parse(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def assigned(owner: Any) -> set[str]:
    """Attributes of self that a method, or any method of a class, assigns."""
    stored = [n for n in ast.walk(_parse(owner)) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def calls(function: Any, name: str) -> list[str]:
    """How a function calls something of this name, as source."""
    found = [node for node in ast.walk(_parse(function)) if isinstance(node, ast.Call)]
    return [ast.unparse(node) for node in found if ast.unparse(node.func).endswith(name)]


def fields(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)
