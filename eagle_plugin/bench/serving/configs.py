"""The servers that the serving benchmark compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from eagle_plugin.bench.engine import GPU_CHAIN
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import Shape

Config = Literal["plain", "builtin_chain", "builtin_tree", "fixed", "plugin"]
CONFIGS: tuple[Config, ...] = get_args(Config)
ALTERNATIVES: tuple[Config, ...] = ("plain", "builtin_chain", "builtin_tree")  # what a user has without the plugin
CHAIN = Shape.chain(2)  # the best chain of both engines' own workers on a CPU (docs/performance.md)
# The policy's log line is written once per second, so that each cell's share of its counts is known to a second.
POLICY_LOG = {"EAGLE_POLICY_LOG_SECONDS": "1"}
POLICY = "EAGLE_POLICY"  # the plugin's variable: "auto" chooses the shape of every round, "fixed" keeps the given one


def config_specs(plain: ServerSpec, wanted: Sequence[Config] | None = None) -> dict[Config, ServerSpec]:
    """The servers by configuration, in the order of `CONFIGS`; `plain` has the sizes and, for the others, the head.

    An engine whose own worker drafts chains only has no "builtin_tree".
    """
    engine = ENGINES[plain.engine]
    builtin, tree = replace(plain, mode="builtin"), engine.own_tree(plain.device)
    plugin = replace(plain, mode="plugin", shape=engine.plugin_shape(plain.head, plain.device, plain.target))
    specs: dict[Config, ServerSpec] = {
        "plain": replace(plain, mode="plain"),
        "builtin_chain": replace(builtin, shape=CHAIN if plain.device == "cpu" else GPU_CHAIN, name="chain"),
        **({} if tree is None else {"builtin_tree": replace(builtin, shape=tree, name="tree")}),
        "fixed": with_policy(plugin, "fixed"),
        "plugin": with_policy(plugin, "auto"),
    }
    return {config: spec for config, spec in specs.items() if wanted is None or config in wanted}


def with_policy(spec: ServerSpec, policy: Literal["fixed", "auto"], name: str = "") -> ServerSpec:
    """The plugin's server under that policy; `name` tells it from others in log files."""
    return replace(spec, environment={**spec.environment, **POLICY_LOG, POLICY: policy}, name=name or policy)
