"""Puts the middleware of the capture into vLLM's API server, as the flag ``--middleware`` would."""

from __future__ import annotations

from argparse import Namespace

from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.traffic.middleware import CaptureMiddleware
from eagle_plugin.traffic.recorder import check_writer
from eagle_plugin.traffic.served import ServedTarget, tell_processes
from eagle_plugin.traffic.settings import CaptureError, capture_settings

MIDDLEWARE = f"{CaptureMiddleware.__module__}.{CaptureMiddleware.__qualname__}"


def add_middleware(args: Namespace) -> None:
    """Add the middleware to the flags of an API server; nothing for other flags.

    Raises:
        StartRefused: the settings are wrong, or the writer cannot start.
    """
    names = getattr(args, "middleware", None)  # of a server; `vllm bench` and others have none
    if names is not None:
        served = getattr(args, "served_model_name", None) or [args.model]
        CaptureMiddleware.model = served if isinstance(served, str) else served[0]
        CaptureMiddleware.served = _served(args)
        # Several API servers get these flags with the middleware, and make it before they load plugins.
        tell_processes(CaptureMiddleware.model, CaptureMiddleware.served)
        if MIDDLEWARE not in names:
            try:
                if settings := capture_settings():
                    check_writer(settings)
                    args.middleware = [*names, MIDDLEWARE]
            except CaptureError as error:
                raise StartRefused(error) from None


def _served(args: Namespace) -> ServedTarget | None:
    """None with LoRA: an answer can be that of an adapter, which the digests of the target do not show."""
    if args.enable_lora:
        return None
    return ServedTarget.of(args.model, args.revision, args.tokenizer, args.chat_template)
