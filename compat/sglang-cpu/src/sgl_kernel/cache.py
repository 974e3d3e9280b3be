"""Slot bookkeeping under the names and argument orders of SGLang's CPU call sites."""

import torch
from eagle_sglang_cpu import cache_index


def _int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64).contiguous()  # both return the tensor itself when there is nothing to do


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Store newly allocated slots, request after request, in req_to_token[req, start:end]."""
    _check_pool_len(req_to_token, pool_len)
    rows, start, end = _int64(req_pool_indices), _int64(start_offset), _int64(end_offset)
    cache_index.write_slots(req_to_token, rows, start, end, _int64(out_cache_loc))


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Fill out_cache_loc, request after request, with req_to_token[req, start:end]."""
    _check_pool_len(req_to_token, pool_len)
    rows, start, end = _int64(req_pool_indices), _int64(start_offset), _int64(end_offset)
    cache_index.read_slots(req_to_token, rows, start, end, out_cache_loc)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Fill out_cache_loc with the topk * num_steps slots that follow each request's committed tokens."""
    _check_pool_len(req_to_token, pool_len)
    start = _int64(seq_lens)
    cache_index.read_slots(req_to_token, _int64(req_pool_indices), start, start + topk * num_steps, out_cache_loc)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """Return the slot table of the draft's decode steps: one row for each beam slot of each request.

    Rows are max(seq_lens) + num_steps long, not pool_len: attention reads no further, and takes the stride from the
    table itself.
    """
    _check_pool_len(req_to_token, pool_len)
    rows, lens = _int64(req_pool_indices), _int64(seq_lens)
    return cache_index.branch_slot_table(req_to_token, rows, lens, topk=topk, steps=num_steps)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Write each request's last accepted token to bonus_tokens."""
    last = accept_lens.to(torch.int64).sub_(1).unsqueeze(1)
    bonus_tokens.copy_(torch.gather(accept_tokens.view(-1, accept_stride), 1, last).squeeze(1))


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Write the slots of all accepted nodes, without gaps, to the front of accept_out_cache_loc."""
    index = accept_index.flatten().to(torch.int32).contiguous()
    cache_index.gather_accepted_slots(index, _int64(out_cache_loc), accept_out_cache_loc)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift every request's input ids left by one and put its new token last, or at select_index."""
    start, lens = _int64(extend_start_loc), _int64(extend_seq_lens)
    at = start + lens - 1 if select_index is None else _int64(select_index)
    cache_index.rotate_ids(input_ids, start, lens, _int64(topk_index).flatten(), at)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy cache rows src_loc to tgt_loc in every layer; all sources are read before any store."""
    cache_index.copy_rows(data_ptrs.view(torch.int64), _int64(strides), _int64(tgt_loc), _int64(src_loc))


def _check_pool_len(req_to_token: torch.Tensor, pool_len: int) -> None:
    if req_to_token.shape[1] != pool_len:
        raise ValueError(
            f"pool_len is {pool_len}, wanted the width of req_to_token, {req_to_token.shape[1]}: pass the whole table."
        )
