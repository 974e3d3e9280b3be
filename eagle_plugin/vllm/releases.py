"""Gives the adapter one form of what releases of vLLM have in different forms, chosen by what the engine has.

A form goes when the last release that has it leaves `version.TESTED`.
"""

from __future__ import annotations

from typing import Any


def keep_hits_long(speculative: Any) -> None:
    """Let a hit of the prefix cache be as long as without drafts; speculative is a vLLM ``SpeculativeConfig``.

    The head's last key of a block may be from another token after the block. Newer releases hash that token with the
    block, so that such a block is not found, and drop nothing. Older ones, and newer ones without these hashes, drop
    the last block of every hit: it is kept instead, because such a key changes a draft a little and never the output,
    and the target's forward over a block of 128 tokens costs far more.
    """
    if getattr(speculative, "disable_lookahead_block_hashes", True):
        speculative.disable_eagle_block_drop = True
