"""Checks the flags, the settings and the draft head in the launcher, before a process is started or a weight loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.block_config import ALGORITHM, METHODS
from eagle_plugin.heads.block_drafter import SGLANG, block_warnings, describe_block
from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import HeadError, LeftToEngine
from eagle_plugin.heads.kinds import HEAD_ARCHITECTURES
from eagle_plugin.heads.manifest import parallel_levels
from eagle_plugin.heads.pickles import pickles_of, unchecked
from eagle_plugin.policy.chooser import policy_mode
from eagle_plugin.policy.log import log_seconds
from eagle_plugin.policy.shapes import CPU_SHAPE, GPU_SHAPE, shape_for
from eagle_plugin.runtime.gpu import may_serve_here
from eagle_plugin.runtime.head_mailbox import check_folder
from eagle_plugin.runtime.preflight import can_check, head_architecture, head_warnings
from eagle_plugin.runtime.startup import LEFT
from eagle_plugin.sglang.adapters import CAPTURED
from eagle_plugin.sglang.block_flags import resolve_on_cpu
from eagle_plugin.sglang.block_support import GPUS_ONLY, unsupported_block_flags
from eagle_plugin.sglang.caches import NAMES, unsupported_cache_variables
from eagle_plugin.sglang.draft_classes import MTP_LAYERS, drafts_by_own_layer, has_own_draft_class
from eagle_plugin.sglang.flag_support import unsupported_flags
from eagle_plugin.sglang.synthetic import synthetic_rates
from eagle_plugin.sglang.target_configs import unsupported_config

logger = logging.getLogger("eagle_plugin")

# Load formats with which SGLang reads no weights in the files of a head's folder that the check reads.
_OTHER_WEIGHTS = ("dummy", "remote", "remote_instance", "sharded_state", "presharded", "private")
_LOST_HEAD = (
    "--enable-memory-saver: /release_memory_occupation drops the head's weights, and new weights of the target do not "
    "bring them back, so that every draft is rejected; add --enable-draft-weights-cpu-backup"
)


def check_launch(server_args: Any) -> None:
    """Refuse a draft head that no worker can serve, and settings of the policy that do not exist; note why a head is
    left to SGLang's own worker.

    Only folders on this disk are checked, and not those that SGLang loads with another class for draft heads, or whose
    weights it takes from elsewhere or from pickles. A folder whose config.json names a plain model, such as the
    target's, is checked, and refused.

    Raises:
        SystemExit: with one sentence that names what was found, what was wanted and the fix.
    """
    from sglang.srt.arg_groups.model_override_base import resolved_view

    arguments = resolved_view(server_args)
    os.environ.pop(LEFT, None)
    algorithm = arguments.speculative_algorithm
    target, head = arguments.model_path, arguments.speculative_draft_model_path
    if algorithm not in ("EAGLE", "EAGLE3", ALGORITHM):
        return
    if unsupported_flags(arguments) or unsupported_block_flags(arguments, server_args):
        return
    try:
        policy_mode()
        log_seconds()
        check_folder()
        synthetic_rates(arguments.speculative_num_steps or 1)
    except UserError as error:
        raise SystemExit(f"eagle-plugin: {error}") from error
    if head is not None and arguments.enable_memory_saver and not _is_kept(arguments):
        logger.warning("eagle-plugin: %s", _LOST_HEAD)
    if head is None or not Path(target).is_dir():
        return
    if not Path(head).is_dir() and (Path(head).is_absolute() or head.startswith(".")):
        raise SystemExit(
            f"eagle-plugin: --speculative-draft-model-path {head} is not a folder; "
            "give the folder that holds the head's config.json and model.safetensors"
        )
    load_format = arguments.speculative_draft_load_format or arguments.load_format
    if load_format in _OTHER_WEIGHTS or not can_check(target, head):
        return
    try:
        if algorithm == ALGORITHM:
            asked = str(server_args.speculative_algorithm).lower()
            # On a GPU SGLang's own worker for DFLASH may serve what the plugin calls another kind.
            is_known = arguments.device == "cpu" and asked in METHODS
            describe_block(target, head, SGLANG, asked if is_known else None)
            for warning in block_warnings(head, arguments.speculative_num_draft_tokens - 1, SGLANG):
                logger.warning("eagle-plugin: %s", warning)
            return
        if has_own_draft_class(head_architecture(head)):
            return
        if pickles := pickles_of(head):
            logger.warning("eagle-plugin: %s", unchecked(head, pickles))
            return
        if arguments.device == "cpu" and read_head(head).leftover_quantisation:
            raise HeadError(
                f"{head} has a quantization_config in config.json, but its weights are plain, and SGLang ends with it "
                "on a CPU; remove the key from the head's config.json"
            )
        for warning in head_warnings(target, head, algorithm, arguments.speculative_num_steps):
            logger.warning("eagle-plugin: %s", warning)
    except LeftToEngine as reason:
        if algorithm == ALGORITHM and arguments.device == "cpu":
            raise SystemExit(f"eagle-plugin: {reason}; {GPUS_ONLY}") from reason
        os.environ[LEFT] = str(reason)
    except HeadError as error:
        raise SystemExit(f"eagle-plugin: {error}") from error


def _is_kept(arguments: Any) -> bool:
    """Whether a release of the weights leaves a copy of the head's in the memory of the host."""
    return bool(arguments.enable_weights_cpu_backup or arguments.enable_draft_weights_cpu_backup)


def resolve_block_flags(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND SGLang's resolution of the flags of block drafters, which a CPU gets from us where we serve."""
    from sglang.srt.arg_groups.overrides import resolving_view

    arguments = resolving_view(server_args)
    if arguments.device != "cpu":
        original(server_args)
        return
    if reasons := unsupported_flags(arguments) + unsupported_block_flags(arguments, server_args):
        algorithm = arguments.speculative_algorithm
        logger.warning("eagle-plugin: %s is not served on a CPU: %s", algorithm, "; ".join(reasons))
        original(server_args)  # says that SGLang's own worker serves it on GPUs only
        return
    resolve_on_cpu(arguments, server_args)


def auto_parameters(server_args: Any, chosen: tuple[int, int, int]) -> Shape:
    """The caps when the user gave none; chosen: what the engine then takes.

    On a CPU they are ours. On a GPU a chain, which the engine takes for nearly all targets, becomes a tree where our
    worker will serve it. A head that drafts all levels in one forward gets deep trees on every device, because depth
    costs it little.
    """
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolved_view

    arguments = resolved_view(server_args)
    if arguments.speculative_algorithm not in ("EAGLE", "EAGLE3"):
        return Shape(*chosen)
    is_ours = arguments.device == "cpu" and arguments.page_size in (1, None)
    caps = CPU_SHAPE if is_ours else Shape(*chosen)
    if unsupported_flags(arguments):
        return caps
    if caps.topk == 1 and arguments.device == "cuda":
        backends = (*attention_backends_of(arguments), arguments.speculative_draft_attention_backend)
        if can_have_trees(server_args, arguments, backends, arguments.page_size):
            caps = GPU_SHAPE
    try:
        levels = parallel_levels(arguments.speculative_draft_model_path)
    except HeadError:  # `check_launch` comes next and says what is wrong
        levels = None
    if levels is None:
        return caps
    # A row of the target's forward costs more on a CPU than it yields: no further nodes there.
    drafts = caps.width - 1 if is_ours else max(caps.width - 1, levels)
    return shape_for(drafts, topk=caps.topk, levels=levels)


# Backends with which SGLang's own worker takes trees too, should it have to serve.
_TREE_BACKENDS = ("fa3", "flashinfer", "triton", None)


def can_have_trees(server_args: Any, arguments: Any, backends: Sequence[str | None], page_size: int | None) -> bool:
    """Whether our worker is to be expected on this GPU, from what is known before a weight is loaded.

    Where it does not serve in the end, the engine's own worker drafts with the caps, and is better with its chain.
    arguments: resolved; backends: of attention, of both models.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if arguments.enable_multi_layer_eagle or unsupported_cache_variables("cuda"):
        return False
    if (arguments.enable_lora or arguments.lora_paths) and arguments.lora_backend != CAPTURED:
        return False
    if page_size not in (1, None) or any(name not in _TREE_BACKENDS for name in backends):
        return False
    config = model_config_of(server_args)
    if not _is_head(arguments, config.hf_config.architectures[0]):
        return False
    caches = (arguments.kv_cache_dtype, arguments.speculative_draft_kv_cache_dtype)
    if not may_serve_here([config.head_dim], [NAMES[name] for name in caches if name in NAMES]):
        return False
    return not unsupported_config(config) and mambaish_config(config) is None


def _is_head(arguments: Any, target: str) -> bool:
    """Whether our worker can draft by this head: a folder is looked at, a name on a model hub only by its algorithm.

    target: the class that the target's config.json names, which says it of layers of the target's own.
    """
    head = arguments.speculative_draft_model_path
    if drafts_by_own_layer(arguments):
        return bool(arguments.speculative_algorithm == "EAGLE") and target in MTP_LAYERS
    if not Path(head).is_dir():
        return bool(arguments.speculative_algorithm == "EAGLE3")
    try:
        return head_architecture(head) in HEAD_ARCHITECTURES
    except HeadError:  # `check_launch` comes next and says what is wrong
        return False
