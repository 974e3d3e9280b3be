"""The servers that the benchmark of P-EAGLE compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from eagle_plugin.bench.serving.configs import POLICY
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.draft_times import VARIABLE

Kind = Literal["plain", "eagle3", "peagle"]
Form = Literal["chain", "tree"]
FORMS: tuple[Form, ...] = get_args(Form)
KS = (3, 7, 11)  # levels
MOST_LEVELS = 16  # of a P-EAGLE head in both engines
TREE_TOPK = 2


class PreparedHead(NamedTuple):
    """The P-EAGLE head of a run, as the servers get it."""

    folder: Path
    name: str
    is_trained: bool
    trained_levels: int | None = None  # by the record of its training


class Config(NamedTuple):
    """One server: which head it has and the shape of all its rounds."""

    kind: Kind
    form: Form  # of a plain server, that of the servers beside which it is measured
    shape: Shape

    @property
    def k(self) -> int:
        """Levels of a draft; 0 is plain decoding."""
        return self.shape.steps

    def __str__(self) -> str:
        return self.kind if self.kind == "plain" else f"{self.kind} {self.shape}"


def shape_of(form: Form, k: int) -> Shape:
    """The shape of k levels: a chain, or a tree with twice the nodes of the chain and two children per node.

    The levels of the tree write 2 (k - 1) draft keys into the 2 k + 1 slots that vLLM reserves for its nodes.
    """
    return Shape.chain(k) if form == "chain" else Shape(k, TREE_TOPK, 2 * (k + 1))


def group_specs(plain: ServerSpec, peagle: Path, form: Form, ks: Sequence[int]) -> dict[str, ServerSpec]:
    """The servers of one form by the name of their `Config`, plain decoding first; they are measured interleaved.

    plain: the sizes, and the EAGLE-3 head for the servers that need it.
    """
    return {str(config): _spec(plain, peagle, config) for config in group_configs(form, ks)}


def group_configs(form: Form, ks: Sequence[int]) -> list[Config]:
    """The servers of one form."""
    kinds: tuple[Kind, ...] = ("eagle3", "peagle")
    return [Config("plain", form, PLAIN), *(Config(kind, form, shape_of(form, k)) for kind in kinds for k in ks)]


def _spec(plain: ServerSpec, peagle: Path, config: Config) -> ServerSpec:
    if config.kind == "plain":
        return replace(plain, mode="plain", name=config.form)
    return replace(
        plain,
        mode="plugin",
        head=peagle if config.kind == "peagle" else plain.head,
        shape=config.shape,
        environment={**plain.environment, POLICY: "fixed", VARIABLE: "1"},
        name=f"{config.kind}-{config.form}-{config.k}",
    )
