"""What a speculative decoder needs of the target: features for the head, and logits after the nodes of a tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.heads.draft_head import DraftHead


def target_features(model: Any, head: DraftHead, tokens: list[int]) -> Tensor:
    """The features [len(tokens), F] that the head reads: the target's last hidden state or the input of aux layers."""
    states = model(torch.tensor([tokens], device=model.device), output_hidden_states=True).hidden_states
    # states[i] is the input of layer i, and states[-1] the output after the final norm
    return torch.cat([states[i][0] for i in head.aux_layers or (-1,)], -1)


def path_logits(model: Any, tokens: list[int], tree: DraftTree) -> Tensor:
    """The target's logits [W, V] after each node of one tree: one forward per leaf, over the tokens and its path.

    tokens end with the root. Rows of padding nodes are 0.
    """
    parents = tree.parents[0].tolist()
    rows: dict[int, Tensor] = {}
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        if path[0] != 0:
            continue  # padding
        ids = torch.tensor([tokens[:-1] + tree.tokens[0, path].tolist()], device=model.device)
        rows |= zip(path, model(ids, logits_to_keep=len(path)).logits[0], strict=True)
    return torch.stack([rows.get(node, torch.zeros_like(rows[0])) for node in range(len(parents))])


def tree_logits(model: Any, tokens: list[int], roots: Tensor, trees: DraftTree) -> Tensor:
    """The logits of `path_logits` for b trees, each at its own place of one text, in one forward.

    roots [b] int64 are the positions of the trees' roots in tokens -> [b, W, V]. A node attends to the tokens before
    its root, to its ancestors and to itself.
    """
    b, W = trees.tokens.shape
    L, device = int(roots.max()), roots.device
    ancestors = (trees.ancestors[:, :, None] >> torch.arange(W, device=device) & 1).bool()  # [b, W, W]
    text = torch.ones(L, L, dtype=torch.bool, device=device).tril()
    before = (torch.arange(L, device=device) < roots[:, None]).repeat_interleave(W, dim=0)  # [b * W, L]
    visible = torch.zeros(L + b * W, L + b * W, dtype=torch.bool, device=device)
    visible[:L, :L], visible[L:, :L], visible[L:, L:] = text, before, torch.block_diag(*ancestors).bool()
    positions = torch.cat([torch.arange(L, device=device), (roots[:, None] + trees.depths).view(-1)])
    output = model(
        torch.cat([torch.tensor(tokens[:L], device=device), trees.tokens.view(-1)])[None],
        attention_mask=_masks(model, visible, positions),
        position_ids=positions[None],
        logits_to_keep=b * W,
        use_cache=False,
    )
    return output.logits[0].view(b, W, -1)


def window_length(model: Any) -> int:
    """The longest distance, in tokens, beyond which some layer of the target sees nothing; 0 where all see all."""
    config = model.config.get_text_config()
    return max(_window(config), _chunk(config))


def _masks(model: Any, visible: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """The attention masks that transformers takes as they are, by type of layer where layers differ.

    visible [n, n] bool: what a token sees without windows; positions [n] int64 -> each [1, 1, n, n] in the model's
    dtype, 0 or the lowest number: `eager` and `flex_attention` add a mask to the scores, `sdpa` takes both kinds.
    """
    config = model.config.get_text_config()
    types, window, chunk = set(getattr(config, "layer_types", None) or ()), _window(config), _chunk(config)

    def mask(seen: Tensor) -> Tensor:
        hidden = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
        return hidden.masked_fill_(~seen, torch.finfo(model.dtype).min)[None, None]

    near = visible & (positions[:, None] - positions < window) if window else visible
    if not types & {"sliding_attention", "chunked_attention"}:
        return mask(near)
    masks = {"full_attention": mask(visible), "sliding_attention": mask(near)}
    if chunk:
        masks["chunked_attention"] = mask(visible & (positions[:, None] // chunk == positions // chunk))
    return masks


def _window(config: Any) -> int:
    types = getattr(config, "layer_types", None)
    return int(getattr(config, "sliding_window", None) or 0) if not types or "sliding_attention" in types else 0


def _chunk(config: Any) -> int:
    types = getattr(config, "layer_types", None) or ()
    return int(getattr(config, "attention_chunk_size", None) or 0) if "chunked_attention" in types else 0
