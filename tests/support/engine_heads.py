"""Runs SGLang's own head classes on given inputs, outside a server but in a process of its own (their state is global).

SGLang has no class for P-EAGLE: its EAGLE-3 class runs such a head's layers and drops mask_hidden, ours keeps it.

Usage: engine_heads.py TARGET OUT ALGORITHM=HEAD...; reads OUT/inputs.safetensors, writes OUT/<i>.safetensors.
Only the attention kernel is replaced, by torch's causal one; names, loading, norms, RoPE and MLP are the engine's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_plugin.heads.files import HeadError
from eagle_plugin.sglang.eagle3_model import Eagle3Head, mask_of


class NoMode:
    def __getattr__(self, name: str) -> Any:
        return lambda: False


def causal_attention(self: Any, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, **_: Any) -> Tensor:
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.scaling)
    return out.transpose(0, 1).flatten(1)


def start_engine(target: Path, out: Path) -> None:
    arguments = ServerArgs(model_path=str(target), device="cpu", attention_backend="torch_native")
    set_global_server_args_for_scheduler(arguments)
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{out / 'rendezvous'}", backend="gloo"
    )
    initialize_model_parallel()
    ranks = ("tp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "moe_ep_rank", "moe_tp_rank", "pp_rank")
    get_parallel().override_permanently(attn_tp_size=1, **dict.fromkeys(ranks, 0))
    initialize_dp_attention(arguments)
    RadixAttention.forward = causal_attention


def run(algorithm: str, folder: Path, target: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(int.from_bytes(folder.name.encode()[-6:]))  # tensors that a checkpoint lacks differ between heads
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    model = (Eagle3Head if algorithm == "EAGLE3" else LlamaForCausalLMEagle)(config)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    embedding, lm_head = (nn.Parameter(target[name], False) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if algorithm == "EAGLE3":
        model.set_embed(embedding)
    else:
        model.set_embed_and_head(embedding, lm_head)
    batch = SimpleNamespace(
        mm_input_embeds=None,
        forward_mode=NoMode(),
        spec_info=SimpleNamespace(hidden_states=inputs[algorithm]),
        residual_stream=None,
    )
    out = model.model(inputs["tokens"], inputs["positions"], batch)
    normed, state = (out[0], out[1][0]) if algorithm == "EAGLE3" else (out, out)
    results = {"state": state, "logits": F.linear(normed, model.lm_head.weight)}
    if getattr(model, "hot_token_id", None) is not None:
        results["target_ids"] = model.hot_token_id
    if (mask := mask_of(model)) is not None:
        results |= {"mask state": mask.hidden.clone(), "mask token": torch.tensor(mask.token)}
        name = "mask_hidden"
        model.load_weights(iter([(name, -2 * load_file(folder / "model.safetensors")[name])]))
        assert mask_of(model) is mask, "captured rounds read another mask than the new one"
        results["new mask state"] = mask.hidden.clone()
        refuse_half_a_mask(config, model.model.fc.in_features)
    return results


def refuse_half_a_mask(config: LlamaConfig, width: int) -> None:
    """The class says what is wrong with a checkpoint that no launcher has looked at."""
    features = ("mask_hidden", torch.ones(1, width))
    token, other = {"mask_token_id": 3, "ptd_token_id": 3}, {"mask_token_id": 10**6, "ptd_token_id": 3}
    cases: list[tuple[dict[str, int], list[tuple[str, Tensor]], str]] = [
        (token, [], "has mask_token_id 3 in config.json and no tensor mask_hidden"),
        (other, [features], "has mask_hidden and mask_token_id 1000000, wanted 0 to"),
        (token, [("mask_hidden", torch.ones(1, 5))], "mask_hidden of shape [1, 5], wanted [1, "),
    ]
    for keys, weights, wanted in cases:
        values = config.to_dict() | keys
        try:
            Eagle3Head(LlamaConfig(**values)).load_weights(iter(weights))
        except HeadError as error:
            assert wanted in str(error), error
        else:
            raise AssertionError(f"not refused: {wanted}")


def main() -> None:
    target, out = Path(sys.argv[1]), Path(sys.argv[2])
    start_engine(target, out)
    weights, inputs = load_file(target / "model.safetensors"), load_file(out / "inputs.safetensors")
    for i, head in enumerate(sys.argv[3:]):
        algorithm, folder = head.split("=", 1)
        with torch.no_grad():
            results = run(algorithm, Path(folder), weights, inputs)
        save_file({name: tensor.contiguous().clone() for name, tensor in results.items()}, out / f"{i}.safetensors")


if __name__ == "__main__":
    main()
