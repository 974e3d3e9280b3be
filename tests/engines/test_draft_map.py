"""A draft vocabulary that names a token twice, of a head that nobody could look at before it was loaded."""

from __future__ import annotations

import torch

from eagle_plugin.runtime.draft_map import repeated_tokens


def test_a_map_must_name_each_token_once() -> None:
    assert repeated_tokens(None) == [] == repeated_tokens(torch.tensor([7, 2, 9]))
    (reason,) = repeated_tokens(torch.tensor([7, 2, 7, 9]))
    assert "maps 4 draft ids to 3 target ids" in reason
