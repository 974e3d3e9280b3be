"""Weights that are updated while the server runs: those of the target go to the target alone, and the head is kept.

An update of SGLang is for the target and the draft model at once unless it says otherwise. The loader of a head dies of
the target's tensors, and the scheduler with it (docs/upstream.md). An update that names the draft model goes to the
head, as SGLang does it. An MTP layer is among the target's tensors: there an update is for both, as SGLang does
it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput
from torch import nn

from eagle_plugin.runtime.draft_weights import int8_copy
from eagle_plugin.sglang.draft_weights import int8_weights

logger = logging.getLogger("eagle_plugin")


def update_weights(original: Any, manager: Any, request: Any) -> Any:
    """One update of a ``SchedulerWeightUpdaterManager`` on a server with our worker."""
    with _chosen_models(manager, request):
        answer = original(manager, request)
    if answer.success:
        manager.draft_worker.weights_updated()
    return answer


def update_weights_from_disk(original: Any, manager: Any, request: Any) -> Any:
    """The same for files. Where they cannot be loaded SGLang loads them once more, and dies of the second error."""
    if request.recapture_cuda_graph and manager.draft_worker.is_captured:
        message = (
            "recapture_cuda_graph is asked for, and the plugin does not capture its rounds again: leave it out where "
            "the new weights have the form of the old ones, or restart the server; no weights were changed"
        )
        return UpdateWeightFromDiskReqOutput(success=False, message=message, num_paused_requests=0)
    try:
        return update_weights(original, manager, request)
    except Exception as error:
        logger.exception("eagle-plugin: the weights in %s could not be loaded", request.model_path)
        message = (
            f"the weights in {request.model_path} could not be loaded ({error}); some of the target's weights may be "
            "new: update them from the folder that was served before, or restart the server"
        )
        return UpdateWeightFromDiskReqOutput(success=False, message=message, num_paused_requests=0)


def begin_or_end(original: Any, manager: Any, request: Any) -> Any:
    """The begin or the end of a session of updates: of the models that its updates are for."""
    with _chosen_models(manager, request):
        return original(manager, request)


def take_new_weights(head: nn.Module) -> None:
    """Round again what `use_int8_weights` rounded: a head may share its output layer with the target."""
    for name, packed in int8_weights(head).items():
        layer: Any = head.get_submodule(name)
        new = int8_copy(layer.weight.data)
        assert new is not None  # there is a kernel: it made the first copy
        with torch.no_grad():
            for old, values in zip(packed, new, strict=True):
                old.copy_(values)


@contextmanager
def _chosen_models(manager: Any, request: Any) -> Iterator[None]:
    """Within this block an update for all models finds no draft worker, as on a server without drafts, where the head
    has files of its own."""
    session = getattr(manager, "_session", None)  # the end of a session is for what its begin named
    chosen = getattr(request, "selector", None) or (session.selector if session else "all")
    worker = manager.draft_worker
    if chosen == "all" and not worker.draft_worker.is_own_layer:
        manager.draft_worker = None
    try:
        yield
    finally:
        manager.draft_worker = worker
