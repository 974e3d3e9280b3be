"""What an engine's Python source declares, by its syntax trees: names, parameters, attributes. Nothing is imported.

So an engine that is installed, and one that was only unpacked, are looked at alike. A place is a dotted name:
"vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample".
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Declared:
    """One name of an engine."""

    parameters: tuple[str, ...] | None  # of a function, as in inspect.signature; None for all else
    node: ast.AST

    @cached_property
    def digest(self) -> str:
        """Of its syntax tree, without docstrings and comments."""
        text = ast.unparse(_WithoutDocstrings().visit(ast.parse(ast.unparse(self.node))))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class EngineSource:
    """The source of one package below a folder, as the folder of installed packages is one."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder = folder
        self.package = package
        self._parsed = lru_cache(maxsize=None)(self._parse)

    @classmethod
    def installed(cls, package: str) -> EngineSource:
        """Of a package that this interpreter would import. Raises ModuleNotFoundError."""
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"no package {package} is installed")
        return cls(Path(next(iter(spec.submodule_search_locations))).parent, package)

    def find(self, place: str) -> Declared | None:
        """What a dotted name stands for; None where there is no such name."""
        node = self._resolve(place)
        return None if node is None else Declared(_parameters(node), node)

    def _resolve(self, place: str, depth: int = 0) -> ast.AST | None:
        """The node of a dotted name; names that a module imports are followed."""
        if depth > 20:  # modules that import from each other
            return None
        parts = place.split(".")
        for n in range(len(parts), 0, -1):
            module = ".".join(parts[:n])
            if (tree := self._parsed(module)) is None:
                continue
            node: ast.AST | None = tree
            scope = module
            for i, name in enumerate(parts[n:]):
                if isinstance(node, ast.ClassDef):
                    node = self._member(node, scope, name, depth)
                elif isinstance(node, ast.Module):
                    found = _of_module(node, name)
                    if isinstance(found, ast.Import | ast.ImportFrom):
                        origin = _origin(found, name, scope, self._is_package(scope))
                        return self._resolve(".".join([origin, *parts[n + i + 1 :]]), depth + 1)
                    node = found
                else:  # a function or a value has no names of its own here
                    node = None
                if node is None:
                    return None
            return node
        return None

    def _member(self, cls: ast.ClassDef, module: str, name: str, depth: int) -> ast.AST | None:
        """A name of a class: of its body, assigned to self by a method, or of a base."""
        if (found := _of_class(cls, name)) is not None:
            return found
        for base in cls.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name | ast.Attribute):
                found = self._resolve(f"{module}.{ast.unparse(base)}.{name}", depth + 1)
                if found is not None:
                    return found
        return None

    def _file(self, module: str) -> Path | None:
        path = self.folder.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
        return None

    def _is_package(self, module: str) -> bool:
        file = self._file(module)
        return file is not None and file.name == "__init__.py"

    def _parse(self, module: str) -> ast.Module | None:
        if module.partition(".")[0] != self.package or (file := self._file(module)) is None:
            return None
        return ast.parse(file.read_text("utf-8"), str(file))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those below `if`, `try` and `with`."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(statement, field, [])
            if isinstance(statement, ast.If | ast.Try | ast.With):
                for part in inner:
                    yield from _statements(part.body if isinstance(part, ast.ExceptHandler) else [part])


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _declares(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return statement.name == name
    return any(isinstance(node, ast.Name) and node.id == name for t in _targets(statement) for node in ast.walk(t))


def _of_module(tree: ast.Module, name: str) -> ast.stmt | None:
    """The last declaration or import of a name in a module."""
    found: ast.stmt | None = None
    for statement in _statements(tree.body):
        imported = isinstance(statement, ast.Import | ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in statement.names
        )
        if imported or _declares(statement, name):
            found = statement
    return found


def _of_class(cls: ast.ClassDef, name: str) -> ast.AST | None:
    for statement in reversed(list(_statements(cls.body))):
        if _declares(statement, name):
            return statement
    for method in cls.body:
        for node in ast.walk(method) if isinstance(method, _FUNCTIONS) else ():
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
            if stored and ast.unparse(node) == f"self.{name}":
                return ast.Name(f"self.{name}")  # where it is assigned says nothing of what it is
    return None


def _origin(statement: ast.Import | ast.ImportFrom, name: str, module: str, is_package: bool) -> str:
    """The place of a name that a module imports."""
    (alias,) = [alias for alias in statement.names if (alias.asname or alias.name) == name][:1]
    if isinstance(statement, ast.Import):
        return alias.name
    above = module.split(".")
    if statement.level:
        above = above[: len(above) - statement.level + is_package]
    start = above if statement.level else []
    return ".".join([*start, *([statement.module] if statement.module else []), alias.name])


def _parameters(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, _FUNCTIONS):
        return None
    given = node.args
    names = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return tuple(argument.arg for argument in names if argument is not None)


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:  # noqa: N802
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node
