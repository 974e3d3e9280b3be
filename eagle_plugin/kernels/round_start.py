"""The start of a decode round in one launch: C++ on the CPU, CUDA on a GPU, torch elsewhere.

A captured round reads these buffers and nothing of the engine's, so that the engine may change its own tables while the
round runs. TypeError and ValueError name a wrong input.
"""

from __future__ import annotations

from torch import Tensor

from eagle_plugin.core import round_start as oracle
from eagle_plugin.core.round_start import RoundStart
from eagle_plugin.core.sampling import SamplingParams
from eagle_plugin.kernels.checks import check_all, check_sampling, check_values
from eagle_plugin.kernels.loader import function

__all__ = ["RoundStart", "start_round"]


def start_round(
    out: RoundStart, lengths: Tensor, rows: Tensor, req_to_token: Tensor, rng_keys: Tensor, sampling: SamplingParams
) -> None:
    """Fill the buffers of a round for b <= B requests; see `core.round_start.start_round`.

    A row of the table is copied up to position L + U - 1; the rest of it stays as it was. On the CPU a row outside
    0 .. P - 1 or a length below 0 gives ValueError; on CUDA such a request becomes a padding request.
    """
    native = function("start_round", lengths.device.type)
    if native is not None:
        native(lengths, rows, req_to_token, rng_keys, sampling, *out)
        return
    # The torch path's checks; those of csrc/bindings/round_start.h.
    b, size, context = check_all(
        ("lengths", lengths, "int64 b"),
        ("rows", rows, "int64 b"),
        ("req_to_token", req_to_token, "int32 P C"),
        ("rng_keys", rng_keys, "int64 P"),
    ).values()
    check_sampling(sampling, "sampling", b)
    padded = check_all(
        ("out.slots", out.slots, "int64 B U"),
        ("out.prefix_lens", out.prefix_lens, "int64 B"),
        ("out.requests", out.requests, "int64 B"),
        ("out.rng_keys", out.rng_keys, "int64 B"),
        ("out.table", out.table, "int32 B C"),
    )["B"]
    check_sampling(out.sampling, "out.sampling", padded)
    if b > padded:
        raise ValueError(f"lengths has {b} requests, wanted at most {padded}: out has a place for each")
    if size < 1 or context < 1:
        raise ValueError(f"req_to_token has shape [{size}, {context}], wanted rows and positions: pass the engine's")
    check_values("lengths[{at}] is {value}", lengths, 0, None, "it counts committed tokens")
    check_values("rows[{at}] is {value}", rows, 0, size - 1, "req_to_token has a row for each request")
    oracle.start_round(out, lengths, rows, req_to_token, rng_keys, sampling)
