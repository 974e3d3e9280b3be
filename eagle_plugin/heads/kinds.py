"""The kinds of draft heads. A new kind is a torch module (one file here) and one entry of `HEADS`, or of
`BLOCK_DRAFTERS`.

Code that must differ by kind asks the entry or a method of the module (`heads.draft_head.DraftHead`) and never compares
names or classes. A kind that the engines load with another class brings its format (`heads.formats`), and one that
learns in another way its method (`learning.train.methods`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from eagle_plugin.core.shape import Levels
from eagle_plugin.heads.block_config import ARCHITECTURE, MARKOV, MARKOV_ARCHITECTURE, METHOD, kind_of
from eagle_plugin.heads.files import Algorithm, HeadError, levels_of
from eagle_plugin.heads.formats import BlockFormat, Eagle3Format, EagleFormat, MarkovFormat, PEagleFormat


@dataclass(frozen=True)
class HeadSpec:
    """What is known of a kind of heads without loading one."""

    kind: str  # its name in recipes, in eagle_plugin.json and in messages
    module: str  # "module:class" for `draft_head.head_class`: importing it here would import torch
    format: EagleFormat  # what the engines read of a checkpoint
    architectures: tuple[str, ...]  # of config.json: SGLang takes the first name that it knows, vLLM the last
    marker: str  # canonical name of a tensor that this kind has and those further down in `HEADS` do not have
    method: str  # vLLM's name in --speculative-config
    levels: Levels  # how the levels of a draft tree are made
    objective: str | None  # how it learns: a name of `learning.train.methods`; None: it is not trained here

    @property
    def algorithm(self) -> Algorithm:
        """SGLang's name in --speculative-algorithm."""
        return self.format.algorithm

    def vllm_config(self, model: str, tokens: int) -> dict[str, Any]:
        """vLLM's --speculative-config for the head in folder `model` with `tokens` drafted tokens per round."""
        values = {"method": self.method, "model": model, "num_speculative_tokens": tokens}
        return values | _of_levels(self.levels)


def _of_levels(levels: Levels) -> dict[str, Any]:
    return {"parallel_drafting": True} if levels is Levels.PARALLEL else {}


# From the most special to the most general: the first whose marker is in a checkpoint is its kind.
HEADS: dict[str, HeadSpec] = {
    spec.kind: spec
    for spec in (
        HeadSpec(
            kind="peagle",
            module="eagle_plugin.heads.peagle:PEagleHead",
            format=PEagleFormat(),
            architectures=("LlamaForCausalLMEagle3",),
            marker="mask_hidden",
            method="eagle3",
            levels=Levels.PARALLEL,
            objective="parallel",
        ),
        HeadSpec(
            kind="eagle3",
            module="eagle_plugin.heads.eagle3:Eagle3Head",
            format=Eagle3Format(),
            architectures=("LlamaForCausalLMEagle3",),
            marker="layers.0.hidden_norm.weight",
            method="eagle3",
            levels=Levels.RECURRENT,
            objective="training_time_test",
        ),
        HeadSpec(
            kind="eagle2",
            module="eagle_plugin.heads.eagle2:Eagle2Head",
            format=EagleFormat(),
            architectures=("LlamaForCausalLMEagle", "LlamaForCausalLM"),
            marker="fc.weight",
            method="eagle",
            levels=Levels.RECURRENT,
            objective="feature_regression",
        ),
    )
}
# SGLang's classes of heads that our worker serves there.
HEAD_ARCHITECTURES = (EagleFormat.loader, Eagle3Format.loader)
# Told by config.json (`block_config.is_block_drafter`), because tensors with these names mean something else elsewhere.
BLOCK_DRAFTERS: dict[str, HeadSpec] = {
    METHOD: HeadSpec(
        kind=METHOD,
        module="eagle_plugin.heads.dflash:DFlashHead",
        format=BlockFormat(),
        architectures=(ARCHITECTURE,),
        marker="hidden_norm.weight",
        method=METHOD,
        levels=Levels.BLOCK,
        objective="blocks",
    ),
    MARKOV: HeadSpec(
        kind=MARKOV,
        module="eagle_plugin.heads.dspark:DSparkHead",
        format=MarkovFormat(),
        architectures=(MARKOV_ARCHITECTURE,),
        marker="markov_head.markov_w1.weight",
        method=MARKOV,
        levels=Levels.BLOCK,
        objective=None,
    ),
}
ALGORITHMS = sorted({spec.algorithm for spec in HEADS.values()})


def find_spec(kind: str) -> HeadSpec:
    """The entry of a kind.

    Raises:
        HeadError: there is none of this name.
    """
    known = HEADS | BLOCK_DRAFTERS
    if kind not in known:
        raise HeadError(f"the kind of head is {kind!r}, wanted one of {', '.join(known)}; correct the name")
    return known[kind]


def all_kinds() -> dict[str, HeadSpec]:
    """The kinds that can be trained."""
    return {kind: spec for kind, spec in (HEADS | BLOCK_DRAFTERS).items() if spec.objective is not None}


def spec_of_tensors(names: Collection[str], architecture: str | None = None) -> HeadSpec | None:
    """The kind of a checkpoint with these canonical names of tensors, or None if they are those of no kind.

    architecture: SGLang's class. It limits the choice to the kinds that this class serves, and the most general of them
    is the answer where no marker is found, so that the tensors can be reported as missing. Without it the tensors
    decide, because official checkpoints call every architecture LlamaForCausalLM.
    """
    specs = [spec for spec in HEADS.values() if architecture in (None, spec.format.loader)]
    found = next((spec for spec in specs if spec.marker in names), None)
    return specs[-1] if found is None and architecture is not None and specs else found


def stored_algorithm(config: dict[str, Any]) -> Algorithm:
    """SGLang's algorithm for a head with this config.json; EAGLE3 where its architecture is unknown."""
    name = (config.get("architectures") or [None])[0]
    return next((spec.algorithm for spec in HEADS.values() if spec.format.loader == name), "EAGLE3")


def served_algorithm(config: dict[str, Any]) -> Algorithm:
    """The same, also of block drafters."""
    block = kind_of(config)
    return stored_algorithm(config) if block is None else BLOCK_DRAFTERS[block].algorithm


def vllm_options(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's --speculative-config must say of a head with this config.json beside its method, see `vllm_config`.

    Raises:
        HeadError: its mask token is no token.
    """
    return _of_levels(levels_of(config)) if kind_of(config) is None else {}
