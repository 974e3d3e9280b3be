"""vLLM's states of thinking budgets are told of every token once, also when a request leaves the batch for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eagle_plugin.vllm.thinking import follow_budgets


class Holder:
    """vLLM's, with the requests of a batch by their place."""

    def __init__(self) -> None:
        self._state: dict[int, dict[str, Any]] = {}
        self.told: list[int] = []  # lengths of the outputs

    def _update_think_state(self, state: dict[str, Any]) -> None:
        self.told.append(len(state["output_tok_ids"]))
        state["sum"] = state.get("sum", 0) + sum(state["output_tok_ids"][-1:])


@pytest.mark.parametrize("kept", [40, 25])  # tokens of the output that are the same when it comes back
def test_a_request_that_comes_back(kept: int) -> None:
    holder, output = Holder(), list(range(100, 140))
    request = SimpleNamespace(sampling_params=SimpleNamespace(thinking_token_budget=9))
    batch = SimpleNamespace(thinking_budget_state_holder=holder, output_token_ids=[[7], output])
    other = SimpleNamespace(sampling_params=SimpleNamespace(thinking_token_budget=None))
    holder._state = {1: {}}
    follow_budgets(batch, [other, request])
    assert holder.told == list(range(41))
    # At another place, with a state that vLLM has just made, and a token more.
    after = [*output[:kept], *range(500, 541 - kept)]
    holder._state, batch.output_token_ids, holder.told = {0: {}}, [after], []
    follow_budgets(batch, [request])
    assert holder.told == ([41] if kept == 40 else list(range(42)))
    assert holder._state[0]["sum"] == sum(after) and holder._state[0]["output_tok_ids"] == after
