"""Looks at the map from a head's draft vocabulary to the target's, once the head is loaded.

Heads in folders are looked at before a start (`heads.draft_vocabulary`), those that an engine fetches from a model hub
are seen here first.
"""

from __future__ import annotations

from torch import Tensor


def repeated_tokens(target_ids: Tensor | None) -> list[str]:
    """Why no trees are drafted by a map [D] of draft ids to target ids; empty without one, or if each is named once.

    Children of a node must be different tokens, or the rule of verification is not exact.
    """
    if target_ids is None or (different := len(target_ids.unique())) == len(target_ids):
        return []
    return [
        f"the draft head has d2t that maps {len(target_ids)} draft ids to {different} target ids, wanted each once; "
        "export d2t as target id minus draft id"
    ]
