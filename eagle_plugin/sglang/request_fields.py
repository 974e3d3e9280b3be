"""What a request of SGLang says of its drafts: in `custom_params` of its sampling parameters, and over HTTP in a field
of its own, which our middleware brings there."""

from __future__ import annotations

from typing import Any

from eagle_plugin.runtime.request_features import read_features
from eagle_plugin.runtime.request_middleware import RequestMiddleware
from eagle_plugin.runtime.request_sources import ALL, FIELD, Sources, asked_sources, read_sources
from eagle_plugin.sglang.traffic import other_server


class SGLangRequests(RequestMiddleware):
    """Of the application that the launcher's process serves."""

    parameters = "custom_params"


def add_requests_middleware(server_args: Any) -> None:
    """Add the middleware to that application, where requests come to it: other servers read `custom_params` alone."""
    if other_server(server_args) is None:
        from sglang.srt.entrypoints.http_server import app

        app.add_middleware(SGLangRequests)


def check_request(params: Any) -> None:
    """AFTER the engine has checked the ``SamplingParams`` of a request, however it came. Raises RequestError."""
    given = params.custom_params
    if isinstance(given, dict):
        read_sources(given.get(FIELD))
        read_features(given.get(FIELD))


def sources_of(requests: list[Any]) -> list[Sources]:
    """What the trees of SGLang ``Req`` objects come from."""
    given = [request.sampling_params.custom_params for request in requests]
    return [asked_sources(parameters) if parameters else ALL for parameters in given]
