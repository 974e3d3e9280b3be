"""Reads an engine's model classes from its source files, without importing the engine."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path


def find_package(name: str) -> Path | None:
    """The folder of an installed package: in this environment, else in the checkout's environment `.venv-NAME`."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    folders = Path(__file__).parents[2].glob(f".venv-{name}/lib/python*/site-packages/{name}")
    return next(iter(folders), None)


class Module:
    """The classes and imports at the top of one source file, and of its imports anywhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def imports(self) -> dict[str, tuple[int, str, str]]:
        """Local name -> (leading dots, module, name there)."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        return {a.asname or a.name: (node.level, node.module or "", a.name) for node in found for a in node.names}

    @cached_property
    def assigned(self) -> dict[str, ast.expr]:
        """Top-level assignments by name."""
        values: dict[str, ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                values[node.target.id] = node.value
        return values


class Sources:
    """All modules of the package in folder `root`, parsed when they are needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[Path, Module] = {}

    def module(self, path: Path) -> Module:
        if path not in self.modules:
            self.modules[path] = Module(path)
        return self.modules[path]

    def locate(self, dotted: str, near: Path | None = None, level: int = 0) -> Path | None:
        """The file of a module: absolute, or `level` dots above the file `near`; None outside of the package."""
        base = self.root.parent if near is None or level == 0 else near.parents[level - 1]
        base = base.joinpath(*dotted.split(".")) if dotted else base
        candidates = (base.with_suffix(".py"), base / "__init__.py")
        return next((path for path in candidates if path.is_file() and self.root in path.parents), None)

    def family(self, path: Path, name: str) -> Iterator[ast.ClassDef]:
        """The class `name` as seen in `path` and its ancestors within the package, nearest first."""
        module = self.module(path)
        if name in module.classes:
            yield module.classes[name]
            for base in module.classes[name].bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(base, ast.Name):
                    yield from self.family(path, base.id)
        elif name in module.imports:
            level, dotted, original = module.imports[name]
            found = self.locate(dotted, path, level)
            if found is not None:
                yield from self.family(found, original)
