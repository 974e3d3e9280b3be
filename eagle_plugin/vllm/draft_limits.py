"""Reads vLLM's `num_speculative_tokens_per_batch_size`: the most drafted tokens per request, by the size of a batch."""

from __future__ import annotations

from typing import Any

from eagle_plugin.vllm.options import OptionError

NAME = "num_speculative_tokens_per_batch_size"


def draft_limits(vllm_config: Any) -> list[int] | None:
    """The limit at each number of requests, from 0 to ``max_num_seqs``, as vLLM's scheduler reads it; None without.

    Raises OptionError.
    """
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    speculative = vllm_config.speculative_config
    given = speculative.num_speculative_tokens_per_batch_size
    if given is None:
        return None
    most = speculative.num_speculative_tokens
    try:
        limits: list[int] = build_dynamic_sd_schedule_lookup(given, vllm_config.scheduler_config.max_num_seqs, most)
    except ValueError as error:
        raise OptionError(
            f"--speculative-config: {NAME} is {given!r}: {str(error).rstrip('.')}; wanted a list of [first batch size, "
            f"last batch size, drafted tokens] such as [[1, 8, {most}], [9, 64, 1]]"
        ) from None
    return limits


def limits_above(vllm_config: Any) -> str | None:
    """A sentence about limits of more tokens than the trees can have, which change nothing; None without such."""
    speculative = vllm_config.speculative_config
    most = speculative.num_speculative_tokens
    above = [entry for entry in speculative.num_speculative_tokens_per_batch_size or [] if entry[2] > most]
    if not above:
        return None
    first, last, tokens = above[0]
    return (
        f"{NAME} has {tokens} drafted tokens for {first} to {last} requests, num_speculative_tokens is {most}: "
        f"trees have at most {most} there too"
    )
