"""Loads heads that store the tables of a draft vocabulary although they draft from all tokens, which vLLM cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from eagle_plugin.heads.files import canonical_name


@contextmanager
def without_whole_tables() -> Iterator[None]:
    """EAGLE-3 heads that are loaded inside leave out a d2t for which vLLM's class has no parameter.

    It has none where the draft vocabulary is the whole one; `head_rules` has seen that the table changes nothing there.
    """
    original = Eagle3LlamaForCausalLM.load_weights

    def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        if model.draft_id_to_target_id is None:
            weights = ((name, values) for name, values in weights if canonical_name(name) != "d2t")
        return original(model, weights)

    Eagle3LlamaForCausalLM.load_weights = load_weights
    try:
        yield
    finally:
        Eagle3LlamaForCausalLM.load_weights = original
