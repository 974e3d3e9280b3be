"""Which row of the looked-up sequences each of vLLM's requests has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.lookups import Lookups, lookups_of, wants_lookups
from eagle_plugin.vllm.request_fields import sources_of
from eagle_plugin.vllm.synthetic import synthetic_rates

_ROWS_PER_REQUEST = 2  # of a full batch: requests that were preempted keep theirs


class LookupRows:
    """The rows of the requests that run or were preempted; one that comes when all are taken is not looked up in."""

    def __init__(self, lookups: Lookups, device: torch.device) -> None:
        self.lookups, self._device = lookups, device
        self._rows: dict[str, int] = {}
        self._free = list(range(len(lookups.history.begins) - 1, 0, -1))  # row 0 is nobody's
        self._newest: tuple[list[int], Tensor] | None = None  # the rows of the step before

    def begin(self, requests: Iterable[Any]) -> None:
        """Note the sequences of vLLM's ``NewRequestData``; its V2 runner gets one for a resumed request too."""
        rows, sequences, sources = [], [], []
        for new in requests:
            text = new.prefill_token_ids or new.prompt_token_ids
            if text is None:  # embeddings
                continue
            if new.req_id not in self._rows and self._free:
                self._rows[new.req_id] = self._free.pop()
            if row := self._rows.get(new.req_id):
                rows.append(row)
                sequences.append(text)
                sources.append(sources_of(new.sampling_params))
        if rows:
            (at,) = to_device([np.array(rows)], self._device)
            self.lookups.begin(at, sequences, sources)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        self._free += [row for name in request_ids if (row := self._rows.pop(name, None)) is not None]

    def of(self, request_ids: Sequence[str], in_prompts: np.ndarray) -> Tensor:
        """The rows [b] int64 of a step; in_prompts [b] bool: requests that got no token in it, which have row 0."""
        rows = [
            0 if waits else self._rows.get(name, 0)
            for name, waits in zip(request_ids, in_prompts.tolist(), strict=True)
        ]
        if self._newest is None or self._newest[0] != rows:
            self._newest = rows, to_device([np.array(rows)], self._device)[0]
        return self._newest[1]


def lookup_rows_of(vllm_config: Any, caps: Shape, device: torch.device, logger: logging.Logger) -> LookupRows | None:
    """Rows for the requests of a server, with a line in its log; None where branches are not looked up."""
    if not wants_lookups() or synthetic_rates(vllm_config.speculative_config) is not None:
        return None
    rows = 1 + _ROWS_PER_REQUEST * vllm_config.scheduler_config.max_num_seqs
    model = vllm_config.model_config
    lookups = lookups_of(rows, caps, model.max_model_len, model.get_vocab_size(), device, logger)
    return None if lookups is None else LookupRows(lookups, device)
