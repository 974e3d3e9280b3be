"""The part of `sgl_kernel` that stock SGLang needs to serve decoder models on a CPU without AMX.

`convert_weight_packed` is absent on purpose: SGLang takes its presence as a sign of AMX kernels and would then call
dozens of operations that only the real package has.
"""

from eagle_sglang_cpu.conflicts import refuse_conflicts

refuse_conflicts()

from sgl_kernel import ops  # noqa: E402, F401  (defines torch.ops.sgl_kernel)
from sgl_kernel.cache import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu  # noqa: E402

__version__ = "0.1.0+eagle.cpu"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    # An AttributeError, so that `hasattr` and `from sgl_kernel import x` inside try blocks keep working.
    raise AttributeError(
        f"sgl_kernel.{name} is not part of eagle-plugin-sglang-cpu, which covers dense decoder models on a CPU without "
        f"AMX: use a machine with the real sglang-kernel package for this model or flag."
    )
