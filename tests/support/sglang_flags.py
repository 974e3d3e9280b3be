"""The server arguments of SGLang with which our worker serves, as far as the plugin reads them."""

from __future__ import annotations

from eagle_plugin.sglang.flag_support import FLAGS

SERVED = {
    **{name: served[0] for name, served, _ in FLAGS},
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_window_size": None,
    "speculative_token_map": None,
    "enable_lora": False,
    "lora_paths": None,
    "forward_hooks": None,
    "enable_memory_saver": False,
    "enable_weights_cpu_backup": False,
    "enable_draft_weights_cpu_backup": False,
    "load_format": "auto",
    "speculative_draft_load_format": None,
}
