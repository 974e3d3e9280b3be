"""Draws mutants of source files by cosmic-ray's operators, for tools/mutation.py: changed files, as JSON.

Run by an environment that has cosmic-ray and need not have anything else. A change that leaves the program as it is (in
an annotation, a docstring, a number's notation) is no mutant.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider


class _WithoutAnnotations(ast.NodeTransformer):
    """Takes away what does not run in a module with `from __future__ import annotations`."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def meaning(source: str) -> str:
    """What of a module runs, for comparisons."""
    return ast.dump(_WithoutAnnotations().visit(ast.parse(source)))


def mutants_of(path: Path) -> Iterator[dict[str, str]]:
    """All mutants of a file."""
    source = path.read_text(encoding="utf-8")
    before, seen = meaning(source), set()
    for name in OperatorProvider():
        kind = OperatorProvider()[name]
        if kind.arguments():  # replaces variables that the caller names
            continue
        operator = kind()
        count = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(get_ast(source)))
        for occurrence in range(count):
            changed = mutate_code(source, operator, occurrence)
            if changed is None:
                continue
            try:
                after = meaning(changed)
            except SyntaxError:
                continue
            if after != before and after not in seen:
                seen.add(after)
                yield {"path": str(path), "operator": name, "source": changed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, required=True, help="mutants to draw, of all that there are")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    every = [mutant for path in sorted(options.files) for mutant in mutants_of(path)]
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))
    json.dump({"of": len(every), "mutants": drawn}, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
