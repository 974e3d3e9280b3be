"""What a request of vLLM says of its drafts: in `extra_args` of its sampling parameters, which are `vllm_xargs` of an
HTTP request, and over HTTP in a field of its own, which our middleware brings there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError

from eagle_plugin.runtime.request_features import read_features
from eagle_plugin.runtime.request_limits import LimitMaker, Limits, served_sources
from eagle_plugin.runtime.request_middleware import RequestMiddleware
from eagle_plugin.runtime.request_sources import (
    ALL,
    FIELD,
    NONE,
    RequestError,
    Sources,
    asked_sources,
    read_sources,
)


class VllmRequests(RequestMiddleware):
    """Of vLLM's API servers."""

    parameters = "vllm_xargs"  # whose values are texts, numbers and lists of them: the field comes as a text


MIDDLEWARE = f"{VllmRequests.__module__}.{VllmRequests.__qualname__}"


def add_requests_middleware(args: Any) -> None:
    """Add the middleware to the flags of an API server, as the flag ``--middleware`` would; nothing for other flags."""
    names = getattr(args, "middleware", None)
    if names is not None and MIDDLEWARE not in names:
        args.middleware = [*names, MIDDLEWARE]


def check_request(params: Any) -> None:
    """Read what the ``SamplingParams`` of a request say, however it came.

    Raises:
        VLLMValidationError: vLLM answers it with HTTP 400, and other errors with 500.
    """
    if not params.extra_args:
        return
    try:
        read_sources(params.extra_args.get(FIELD))
        if read_features(params.extra_args.get(FIELD)) is not None:
            params.skip_reading_prefix_cache = True  # the states of tokens that are found there are not seen
    except RequestError as error:
        raise VLLMValidationError(str(error)) from None


def sources_of(params: Any) -> Sources:
    """What the trees of a request come from; params: its ``SamplingParams``, None for one that only pools."""
    return asked_sources(params.extra_args) if params is not None and params.extra_args else ALL


class AskedSources:
    """What the requests of a worker ask for, by request id."""

    def __init__(self, device: torch.device, chains: bool) -> None:
        """chains: whether requests with a grammar get chains, which are never looked up."""
        self._chains, self._limits = chains, LimitMaker(device)
        self._asked: dict[str, Sources] = {}  # of the requests that want no node of the head

    def begin(self, requests: Iterable[Any], is_looked_up: Callable[[str], bool]) -> None:
        """Note vLLM's ``NewRequestData``; is_looked_up: whether there is a text to look branches up in, by request."""
        for new in requests:
            asked = sources_of(new.sampling_params)
            self._asked.pop(new.req_id, None)  # of the turn before, where a request goes on with more input
            if asked.head:
                continue
            is_chain = self._chains and new.sampling_params.structured_outputs is not None
            self._asked[new.req_id] = served_sources(asked, is_looked_up(new.req_id) and not is_chain)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        for name in request_ids:
            self._asked.pop(name, None)

    def limits(self, request_ids: Sequence[str], in_prompts: np.ndarray | None = None) -> Limits | None:
        """Of a batch; in_prompts [b] bool: requests that got no token, whose drafts nobody will verify."""
        if not self._asked:
            return None
        sources = [self._asked.get(name, ALL) for name in request_ids]
        if in_prompts is not None:
            sources = [NONE if waits and not one.head else one for one, waits in zip(sources, in_prompts, strict=True)]
        return self._limits.of(sources)
