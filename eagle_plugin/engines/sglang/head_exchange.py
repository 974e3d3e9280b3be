"""Another draft head in the place of the served one, in SGLang: loaded beside it, then exchanged between two rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_plugin.core.survival import Survival
from eagle_plugin.engines.sglang.draft_weights import use_int8_weights
from eagle_plugin.engines.sglang.eagle3_model import mask_of
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.same_form import check_same_form


def exchange_head(worker: Any, head: Path) -> None:
    """Serve the head of a folder from the next round on; requests go on.

    worker: a `TreeWorker` of one rank without graphs. The cache keeps the keys that the old head wrote: texts do not
    depend on them. What the policy learned of the old head's drafts is forgotten.

    Raises:
        HeadError: the head is not of the target, or not of the form of the served one, or captured rounds read the
        served one. Whatever is raised: the served head stays.
    """
    drafter, arguments = worker._draft_worker, worker.server_args
    runner, config = drafter.draft_runner, drafter.draft_runner.model_config
    if worker._round.sizes() or arguments.tp_size > 1:
        raise HeadError(
            f"{head} cannot take the place of the served head: captured rounds or several ranks read it; start the "
            "server with the new head instead"
        )
    check_head(arguments.model_path, head, algorithm=arguments.speculative_algorithm)
    check_same_form(config.model_path, head)
    before, served, tokens = runner.model, config.model_path, drafter.hot_token_id
    config.model_path = str(head)
    try:
        with drafter._contexts():
            runner.load_model()
            drafter.init_lm_head()
    except BaseException:
        config.model_path, runner.model, drafter.hot_token_id = served, before, tokens
        raise
    drafter.mask = mask_of(runner.model)
    use_int8_weights(runner.model, worker._target_worker.model_runner.model)
    policy = worker.shapes.policy
    if policy is not None:
        policy.survival = Survival(policy.shapes)
