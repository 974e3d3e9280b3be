"""Exchanges the served draft head in SGLang: copies the weights of another head over those of the served one.

Captured rounds go on: they read the same addresses. The new head is loaded beside the served one first, so that a head
which cannot be loaded changes nothing.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from eagle_plugin.common.deploy_folder import Served
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.same_form import check_same_form
from eagle_plugin.runtime.head_mailbox import HeadMailbox, open_mailbox
from eagle_plugin.sglang.draft_weights import int8_weights, use_int8_weights
from eagle_plugin.sglang.eagle3_model import Eagle3Head

OWN_LAYER = "it drafts by an MTP layer of its target, which has no files of its own"


def mailbox_of(worker: Any) -> HeadMailbox | None:
    """Where this rank of a server is told of other heads; None where it is not, or with a block drafter."""
    if worker.draft_worker.levels.block is not None:
        return None
    arguments, parallel = worker.server_args, get_parallel()
    target, head = arguments.model_path, arguments.speculative_draft_model_path
    served = Served("sglang", target, head or target, arguments.speculative_algorithm)
    ranks, log = parallel.tp_size * arguments.dp_size, logging.getLogger("eagle_plugin")
    rank = parallel.tp_rank + parallel.tp_size * (parallel.dp_rank or 0)
    refuses = OWN_LAYER if worker.draft_worker.is_own_layer else ""
    return open_mailbox(served, partial(exchange_head, worker), log, rank=rank, ranks=ranks, refuses=refuses)


def exchange_head(worker: Any, head: Path) -> None:
    """Serve the head of a folder from the next round on; requests go on.

    worker: a `TreeWorker` of one rank. The cache keeps the keys that the old head wrote: texts do not depend on them.
    What the policy learned of the old head's drafts is forgotten.

    Raises:
        HeadError: the head is not of the target, or not of the form of the served one. Whatever is raised: the served
        head stays.
    """
    drafter, arguments = worker._draft_worker, worker.server_args
    runner, config = drafter.draft_runner, drafter.draft_runner.model_config
    check_head(arguments.model_path, head, algorithm=arguments.speculative_algorithm)
    check_same_form(config.model_path, head)
    before, served, tokens = runner.model, config.model_path, drafter.hot_token_id
    config.model_path = str(head)
    try:
        with drafter._contexts():
            runner.load_model()
            drafter.init_lm_head()
        use_int8_weights(runner.model, worker._target_worker.model_runner.model)
        copies = pairs(tensors_of(before, tokens), tensors_of(runner.model, drafter.hot_token_id))
    except BaseException:
        config.model_path = served
        raise
    finally:
        runner.model, drafter.hot_token_id = before, tokens
    with torch.no_grad():
        for old, new in copies:
            old.copy_(new)
    worker.shapes.forget_head()


def tensors_of(model: nn.Module, tokens: Tensor | None = None) -> dict[str, Tensor]:
    """Everything of a loaded head that a round reads, by name: weights, int8 copies, masked rows, the draft vocabulary.

    tokens [V of the head] int64: the target's id of each token of the draft vocabulary.
    """
    found: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, packed in int8_weights(model).items():
        found |= {f"{name}.int8.{field}": tensor for field, tensor in packed._asdict().items()}
    if isinstance(model, Eagle3Head) and model.mask is not None:
        found |= {"mask": model.mask.hidden, "mask features": model.mask_features}
    return found if tokens is None else found | {"draft vocabulary": tokens}


def pairs(served: dict[str, Tensor], new: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The tensors to copy, from the second of each pair to the first; those that both share with the target need none.

    Raises:
        HeadError: a tensor is in one of them only, or of another shape or dtype.
    """
    for name in sorted(served.keys() | new.keys()):
        one, other = served.get(name), new.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            shown = ["nothing" if x is None else f"{list(x.shape)} {x.dtype}" for x in (other, one)]
            raise HeadError(
                f"the new head was loaded with {shown[0]} for {name}, wanted {shown[1]} as the served one; start the "
                "server with the new head instead"
            )
    return [(one, new[name]) for name, one in served.items() if one.data_ptr() != new[name].data_ptr()]
