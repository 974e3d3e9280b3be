"""What the hooks for Llama 4 do when SGLang calls through them; its texts are compared in test_families.py."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
from eagle_sglang_cpu import llama4  # noqa: E402
from sgl_kernel import ops  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402


@pytest.mark.parametrize("use_rope, chunk, window", [(True, 32, -33), (False, 32, -1), (True, None, -1)])
def test_local_layers_name_their_chunk(use_rope, chunk, window):
    layer = SimpleNamespace(use_rope=use_rope, attn=SimpleNamespace(sliding_window_size=-1))
    assert llama4.name_chunk(None, layer, config=SimpleNamespace(attention_chunk_size=chunk), layer_id=0) is None
    assert layer.attn.sliding_window_size == window
    given = ops._nearest(window + 1)  # what the engine's backend passes on
    assert given == ({"chunk": 32} if window < -1 else {"window": -1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_rope", [True, False])
def test_attention_keeps_the_dtype_and_the_rotated_keys(use_rope, dtype):
    seen = {}

    def attention(q, k, v, forward_batch):
        seen.update(q=q, k=k, v=v)
        return q

    def projection(columns):
        made = nn.Linear(8, columns, bias=False, dtype=dtype)
        return made, lambda x: (made(x), None)

    weights, qkv = projection(8 + 4 + 4)
    _, back = projection(8)
    layer = SimpleNamespace(
        qkv_proj=qkv, q_size=8, kv_size=4, head_dim=4, use_rope=use_rope, attn=attention, o_proj=back,
        rotary_emb=(lambda positions, q, k: (q + 1, k + 2)) if use_rope else None,
        qk_norm=(lambda x: 3 * x) if use_rope else None,
        attn_temperature_tuning=True, _get_attn_scale=lambda positions: 1.0 + positions[:, None],
    )  # fmt: skip
    positions, hidden = torch.tensor([0, 1, 2]), torch.randn(3, 8, dtype=dtype)
    out = llama4.attend(None, layer, positions=positions, hidden_states=hidden, forward_batch=None)
    q, k, v = weights(hidden).split([8, 4, 4], dim=-1)
    wanted = (3 * (q + 1), 3 * (k + 2), v) if use_rope else (q * (1 + positions[:, None]), k, v)
    for name, values in zip("qkv", wanted, strict=True):
        assert seen[name].dtype == dtype
        assert torch.equal(seen[name], values)
    assert torch.equal(out, back(seen["q"])[0])


@dataclass
class Config:
    apply_router_weight_on_input: bool


def run(layer, x, topk_output, config):
    """Experts that are not linear, so that it counts where the weight goes."""
    if config.apply_router_weight_on_input:
        raise NotImplementedError
    return x.square() * topk_output.topk_weights.sum(dim=1, keepdim=True)


def test_a_weight_goes_to_the_input_of_a_tokens_only_expert():
    x = torch.randn(5, 4)
    one = StandardTopKOutput(torch.rand(5, 1), torch.zeros(5, 1, dtype=torch.int32), torch.randn(5, 3))
    found = llama4.weigh_inputs(run, None, x, one, Config(True))
    torch.testing.assert_close(found, (x * one.topk_weights).square())
    torch.testing.assert_close(llama4.weigh_inputs(run, None, x, one, Config(False)), x.square() * one.topk_weights)
    two = StandardTopKOutput(torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int32), torch.randn(5, 3))
    with pytest.raises(NotImplementedError):
        llama4.weigh_inputs(run, None, x, two, Config(True))


def test_the_engine_calls_what_is_hooked_with_these_arguments():
    import inspect

    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.models.llama4 import Llama4Attention, Llama4DecoderLayer

    def parameters(function):
        return [*inspect.signature(inspect.unwrap(function)).parameters]

    assert parameters(Llama4Attention.forward) == ["self", "positions", "hidden_states", "forward_batch"]
    assert parameters(Llama4Attention.__init__)[:2] == ["self", "config"]
    assert parameters(moe_forward_native) == ["layer", "x", "topk_output", "moe_runner_config"]
    source = inspect.getsource(Llama4DecoderLayer.__init__)
    assert "self.self_attn = Llama4Attention(\n            config=config," in source
