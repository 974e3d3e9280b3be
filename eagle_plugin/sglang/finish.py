"""Ends a request where plain decoding would end it, when a round has accepted several of its tokens.

SGLang looks for the stops of a request once per round, in the text of all accepted tokens: it takes the stop that is
listed first, not the one that is complete first, and a stop string before a stop token (docs/upstream.md).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"


def finish_in_order() -> None:
    """Have this process look for stops token by token; to be called where the worker serves (see `metrics`)."""
    source = HookSource("eagle_plugin", "eagle-plugin")
    HookRegistry.register(FINISH, finish_at_first_stop, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()


def finish_at_first_stop(original: Any, request: Any, new_accepted_len: int = 1) -> None:
    """AROUND the step that decides whether a request is finished, after its tokens were appended to ``output_ids``.

    The engine's own rule is asked after each of the new tokens, as in plain decoding. Without stop strings it is asked
    once: it looks at stop tokens and at the length in the order of the text.
    """
    sampling = request.sampling_params
    has_stop_strings = bool(sampling.stop_strs or sampling.stop_regex_strs)
    if new_accepted_len < 2 or not has_stop_strings or request.to_finish or request.finished():
        original(request, new_accepted_len)
        return
    tokens, grammar = request.output_ids, request.grammar
    run = tokens[-new_accepted_len:]
    del tokens[-new_accepted_len:]
    request.grammar = None  # it has read the whole run: whether the text is complete is known after the last token only
    for read, token in enumerate(run, 1):
        tokens.append(token)
        if read == new_accepted_len:
            request.grammar = grammar
        original(request, 1)
        if request.finished():
            if request.finished_len is None:
                request.finished_len = len(tokens)
            tokens.extend(run[read:])  # their keys and values are in the cache; the engine frees them by this length
            break
    request.grammar = grammar
