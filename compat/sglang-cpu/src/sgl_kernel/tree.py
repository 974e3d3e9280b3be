"""Tree building and greedy verification under the names and argument orders of SGLang's CPU call sites."""

import torch
from eagle_sglang_cpu import tree_links

QLEN_ONLY = 1  # sglang.kernels.ops.speculative.spec_tree.TreeMaskMode, the mode that SGLang uses on a CPU


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Write the ancestor mask, positions and links of the selected draft trees; the mask mode must be QLEN_ONLY."""
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(
            f"tree mask mode is {int(tree_mask_mode)}, wanted QLEN_ONLY ({QLEN_ONLY}), the mode of SGLang's CPU "
            f"attention: do not override default_tree_mask_mode()."
        )
    if retrieve_index.shape[1] != draft_token_num:
        raise ValueError(
            f"draft_token_num is {draft_token_num}, wanted the width of retrieve_index, {retrieve_index.shape[1]}."
        )
    b = verified_seq_len.shape[0]
    used = b * draft_token_num * draft_token_num  # the engine may hand over a larger buffer
    tree_links.link_tree(
        parent_list.to(torch.int64).contiguous(),
        selected_index.to(torch.int64).contiguous(),
        verified_seq_len.to(torch.int64).contiguous(),
        tree_mask.flatten()[:used],
        positions,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        topk=topk,
        depth=depth,
    )


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the target's choices down each tree; writes predicts, accept_index and accept_token_num in place."""
    tree_links.walk_links(
        predicts,
        accept_index,
        accept_token_num,
        candidates.to(torch.int64).contiguous(),
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict.to(torch.int64).contiguous(),
    )
