"""Two-sample G-tests of sampled token sequences."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_EXPECTED = 5  # the chi-square approximation wants as much in every cell


def g_test(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """p-value of the hypothesis that both samples [n] and [m] of cell numbers have one distribution.

    Cells that expect fewer than 5 in the smaller sample are pooled into one. Samples of one cell have p = 1.
    """
    cells, where = np.unique(np.concatenate([first, second]), return_inverse=True)
    table = np.stack([np.bincount(part, minlength=len(cells)) for part in np.split(where, [len(first)])])
    least = table.sum(axis=0) * min(len(first), len(second)) / (len(first) + len(second))
    columns = list(table[:, least >= LEAST_EXPECTED].T)
    rare = table[:, least < LEAST_EXPECTED].sum(axis=1)
    if least[least < LEAST_EXPECTED].sum() >= LEAST_EXPECTED or not columns:
        columns.append(rare)
    else:  # too little for a cell of its own
        columns[-1] = columns[-1] + rare
    if len(columns) == 1:
        return 1.0
    observed = torch.from_numpy(np.stack(columns, axis=1)).double()
    wanted = observed.sum(dim=0) * observed.sum(dim=1, keepdim=True) / observed.sum()
    statistic = 2 * torch.special.xlogy(observed, observed / wanted).sum()
    freedom = torch.tensor(len(columns) - 1, dtype=torch.float64)
    # The upper tail of chi-square; scipy, which has it ready, is in none of the engines' environments but SGLang's.
    return float(torch.special.gammaincc(freedom / 2, statistic.clamp(min=0) / 2))


def views(tokens: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Cell numbers of sequences [n, 4]: the four positions, and the joints of neighbours."""
    found = {f"token {i + 1}": tokens[:, i] for i in range(tokens.shape[1])}
    joints = {f"tokens {i + 1} and {i + 2}": tokens[:, i] * 2**20 + tokens[:, i + 1] for i in range(2)}
    return found | joints


def p_values(first: NDArray[np.int64], second: NDArray[np.int64]) -> dict[str, float]:
    """The G-test of every view of two samples of sequences [n, 4] and [m, 4]."""
    ours, theirs = views(first), views(second)
    return {name: g_test(ours[name], theirs[name]) for name in ours}
