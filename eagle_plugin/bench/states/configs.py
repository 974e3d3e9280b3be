"""The servers that the benchmark of a trained head compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.serving.configs import with_policy
from eagle_plugin.bench.spec import ServerSpec

State = Literal["none", "base", "trained"]
STATES: tuple[State, ...] = get_args(State)
NAMES: dict[State, str] = {"none": "no EAGLE", "base": "base head", "trained": "trained head"}
Worker = Literal["plugin", "fixed", "builtin"]
WORKERS: tuple[Worker, ...] = get_args(Worker)


def state_specs(plain: ServerSpec, trained: Path, base: Path | None, worker: Worker) -> dict[State, ServerSpec]:
    """The servers by state; without a base head there is no state "base".

    Args:
        plain: sizes, engine and target of all of them.
        worker: who serves the heads: the plugin, which chooses the shape of every round; the plugin with one tree
            ("fixed"); or the engine's own EAGLE ("builtin").
    """
    specs: dict[State, ServerSpec] = {"none": replace(plain, mode="plain", head=None, name="none")}
    heads: dict[State, Path | None] = {"base": base, "trained": trained}
    for state, head in heads.items():
        if head is not None:
            specs[state] = _with_head(plain, head, state, worker)
    return specs


def _with_head(plain: ServerSpec, head: Path, state: State, worker: Worker) -> ServerSpec:
    engine = ENGINES[plain.engine]
    if worker == "builtin":
        return replace(plain, mode="builtin", head=head, shape=engine.own_shape(plain.device, plain.target), name=state)
    spec = replace(plain, mode="plugin", head=head, shape=engine.plugin_shape(head, plain.device, plain.target))
    return with_policy(spec, "auto" if worker == "plugin" else "fixed", state)
