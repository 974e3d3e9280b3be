"""The accepted paths as rows, in one launch: C++ on the CPU, CUDA on a GPU, torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_plugin.core import accepted_path as oracle
from eagle_plugin.core.accepted_path import AcceptedPath
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.checks import check_all
from eagle_plugin.kernels.loader import function

__all__ = ["AcceptedPath", "read_path"]


def read_path(accepted: Accepted, prefix_lens: Tensor, width: int) -> AcceptedPath:
    """Read the paths of trees of `width` nodes; see `core.accepted_path.read_path`.

    TypeError and ValueError name an argument of a wrong dtype or shape. Values are not checked.
    """
    native = function("read_path", prefix_lens.device.type)
    if native is None:
        sizes = check_all(
            ("accepted.index", accepted.index, "int32 b E"),
            ("accepted.lengths", accepted.lengths, "int32 b"),
            ("accepted.tokens", accepted.tokens, "int64 b E"),
            ("prefix_lens", prefix_lens, "int64 b"),
        )
        if sizes["E"] < 1:
            raise ValueError("accepted.index has 0 places per request, wanted at least 1: the bonus token has one")
        return oracle.read_path(accepted, prefix_lens, width)
    path = AcceptedPath(
        torch.empty_like(accepted.tokens),
        torch.empty_like(accepted.tokens),
        torch.empty_like(prefix_lens),
        torch.empty_like(prefix_lens),
    )
    native(accepted.index, accepted.lengths, accepted.tokens, prefix_lens, width, *path)
    return path
