"""Loads heads that store the tables of a draft vocabulary although they draft from all tokens, which vLLM cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM

from eagle_plugin.heads.files import canonical_name

CLASSES = (Eagle3LlamaForCausalLM, Eagle3Qwen3ForCausalLM)


@contextmanager
def without_whole_tables() -> Iterator[None]:
    """EAGLE-3 heads that are loaded inside leave out a d2t for which vLLM's class has no parameter.

    It has none where the draft vocabulary is the whole one; `heads.vllm_rules` has seen that the table changes nothing
    there.
    """
    originals = [kind.load_weights for kind in CLASSES]
    for kind, original in zip(CLASSES, originals, strict=True):
        kind.load_weights = _without_whole_table(original)
    try:
        yield
    finally:
        for kind, original in zip(CLASSES, originals, strict=True):
            kind.load_weights = original


def _without_whole_table(original: Any) -> Any:
    def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        if model.draft_id_to_target_id is None:
            weights = ((name, values) for name, values in weights if canonical_name(name) != "d2t")
        return original(model, weights)

    return load_weights
