"""Thinking budgets: vLLM's state of a request is led from token to token, as in plain decoding.

After every token the state says whether the end of the thoughts is forced. There is one state per request, and none per
node: a request whose thoughts may be ended within a round verifies its root only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_SEEN = "eagle_plugin_seen"  # tokens of the output that a state was told of
_KEPT = "eagle_plugin_budget"  # of a `CachedRequestState`: its state, for when it comes back into the batch


def follow_budgets(metadata: Any, states: list[Any]) -> None:
    """Tell vLLM's holder of budgets of the newest tokens, one after another; a round yields several.

    metadata: a vLLM ``SamplingMetadata``; states: the batch's ``CachedRequestState``. The holder must have been made
    for no draft tokens. A request that moved to the place of a finished one loses that one's budget, which vLLM would
    apply to it.
    """
    holder = metadata.thinking_budget_state_holder
    for i, state in list(holder._state.items() if holder is not None else ()):
        if i >= len(states) or states[i].sampling_params.thinking_token_budget is None:
            del holder._state[i]
            continue
        output = metadata.output_token_ids[i]
        kept = getattr(states[i], _KEPT, None)
        # vLLM begins anew then. To tell it of every token again takes time that grows with the square of the text.
        if _SEEN not in state and kept is not None and output[: kept[_SEEN]] == kept["output_tok_ids"]:
            holder._state[i] = state = kept
        for seen in range(state.get(_SEEN, -1) + 1, len(output) + 1):
            # As `ThinkingBudgetStateHolder.update_state`, which takes all requests at once.
            state |= {"output_tok_ids": output[:seen], "spec_token_ids": [], "in_spec_mode": False, "force_index": []}
            holder._update_think_state(state)
            state[_SEEN] = seen
        setattr(states[i], _KEPT, state)


def plain_requests(metadata: Any, reach: int) -> list[int]:
    """Requests whose thoughts may be ended within the next `reach` tokens: they are served token by token."""
    return [i for i, state in _states(metadata).items() if state["in_end"] or 0 <= _left(state) <= reach]


def forces_ends(metadata: Any) -> bool:
    """Whether the next token of any request is forced."""
    return any(state["in_end"] for state in _states(metadata).values())


def force_ends(metadata: Any, nodes: Tensor, logits: Tensor) -> None:
    """Force the next token of requests whose thoughts end, in place; nodes [n] int64 is the node of each row."""
    if forces_ends(metadata):
        roots = (nodes == 0).nonzero()[:, 0]
        logits[roots] = metadata.thinking_budget_state_holder.apply_to_logits(logits[roots], False, None)


def _states(metadata: Any) -> dict[int, dict[str, Any]]:
    holder = metadata.thinking_budget_state_holder
    return {} if holder is None else dict(sorted(holder._state.items()))


def _left(state: dict[str, Any]) -> int:
    """Thinking tokens that are left, or fewer; -1 where vLLM follows no budget."""
    budget = int(state["thinking_token_budget"])
    return budget if budget < 0 or state["start_thinking"] < 0 else max(int(state["check_count_down"]), 0)
