"""The start of a decode round in one launch: C++ on the CPU, CUDA on a GPU, torch elsewhere.

A captured round reads these buffers and nothing of the engine's, so that the engine may change its own tables while the
round runs. TypeError and ValueError name a wrong input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import round_start as oracle
from eagle_plugin.core.round_start import RoundStart
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.kernels.checks import ANY, check
from eagle_plugin.kernels.loader import function

__all__ = ["RoundStart", "start_round"]


def start_round(
    out: RoundStart, lengths: Tensor, rows: Tensor, req_to_token: Tensor, keys: Tensor, sampling: SamplingParams
) -> None:
    """Fill the buffers of a round for b <= B requests; see `core.round_start.start_round`.

    A row of the table is copied up to position L + U - 1; the rest of it stays as it was. On the CPU a row outside
    0 .. P - 1 or a length below 0 gives ValueError; on CUDA such a request becomes a padding lane.
    """
    native = function("start_round", lengths.device.type)
    if native is not None:
        native(lengths, rows, req_to_token, keys, *sampling, *out[:5], *out.sampling)
        return
    _check_start(out, lengths, rows, req_to_token, keys, sampling)
    oracle.start_round(out, lengths, rows, req_to_token, keys, sampling)


# The torch path's copy of the argument checks in csrc/bindings/round_start.h; the tests want the same sentences from
# both.


def _check_start(
    out: RoundStart, lengths: Tensor, rows: Tensor, req_to_token: Tensor, keys: Tensor, sampling: SamplingParams
) -> None:
    check(lengths, "lengths", torch.int64, (ANY,))
    b = len(lengths)
    check(rows, "rows", torch.int64, (b,))
    check(req_to_token, "req_to_token", torch.int32, (ANY, ANY))
    size, context = req_to_token.shape
    check(keys, "keys", torch.int64, (size,))
    _check_sampling(sampling, "sampling", b)
    check(out.slots, "out.slots", torch.int64, (ANY, ANY))
    lanes = len(out.slots)
    check(out.prefix_lens, "out.prefix_lens", torch.int64, (lanes,))
    check(out.requests, "out.requests", torch.int64, (lanes,))
    check(out.keys, "out.keys", torch.int64, (lanes,))
    check(out.table, "out.table", torch.int32, (lanes, ANY))
    _check_sampling(out.sampling, "out.sampling", lanes)
    if b > lanes:
        raise ValueError(f"lengths has {b} requests, wanted at most {lanes}: out has a lane for each")
    if size < 1 or context < 1:
        raise ValueError(f"req_to_token has shape [{size}, {context}], wanted rows and positions: pass the engine's")
    if not lengths.is_cpu:
        return
    for i, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
        if length < 0:
            raise ValueError(f"lengths[{i}] is {length}, wanted 0 or more: it counts committed tokens")
        if not 0 <= row < size:
            raise ValueError(f"rows[{i}] is {row}, wanted 0 to {size - 1}: req_to_token has a row for each request")


def _check_sampling(params: SamplingParams, name: str, rows: int) -> None:
    check(params.temperatures, f"{name}.temperatures", torch.float32, (rows,))
    check(params.top_ks, f"{name}.top_ks", torch.int32, (rows,))
    check(params.top_ps, f"{name}.top_ps", torch.float32, (rows,))
    check(params.min_ps, f"{name}.min_ps", torch.float32, (rows,))
