"""Gated delta nets on a CPU: the parts of a prompt and the single tokens after it give what one pass over all gives."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")
from eagle_sglang_cpu import hooks
from sgl_kernel import mamba

HK, HV, K, V, TAPS = 2, 4, 8, 8, 4
LENGTHS = (70, 1, 130)  # tokens of three sequences, less and more than a chunk
SLOTS = torch.tensor([3, 1, 4])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_tokens_one_by_one_are_the_chunks() -> None:
    n = sum(LENGTHS)
    q, k, v = draw(1, n, HK, K, seed=1), draw(1, n, HK, K, seed=2), draw(1, n, HV, V, seed=3)
    a, b, a_log, dt_bias = draw(n, HV, seed=4), draw(n, HV, seed=5), draw(HV, seed=6), draw(HV, seed=7)
    g, beta = mamba.fused_gdn_gating(a_log, a, b, dt_bias)
    begun = draw(6, HV, V, K, seed=8)
    chunked, single = begun.clone(), begun.clone()
    shared = {"initial_state": chunked, "initial_state_indices": SLOTS, "cu_seqlens": starts(LENGTHS)}
    out, *_ = mamba.chunk_gated_delta_rule_cpu(q, k, v, g, beta, head_first=False, **shared)
    for i, length in enumerate(LENGTHS):
        for t in range(int(starts(LENGTHS)[i]), int(starts(LENGTHS)[i]) + length):
            one = slice(t, t + 1)
            found = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
                A_log=a_log,
                dt_bias=dt_bias,
                q=q[:, one],
                k=k[:, one],
                v=v[:, one],
                a=a[one],
                b=b[one],
                initial_state_source=single,
                initial_state_indices=SLOTS[i : i + 1],
                cu_seqlens=torch.tensor([0, 1]),
                use_qk_l2norm_in_kernel=True,
            )
            torch.testing.assert_close(found[0, 0], out[0, t], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single, chunked, rtol=1e-4, atol=1e-4)
    others = [0, 2, 5]
    assert torch.equal(chunked[others], begun[others]) and not torch.equal(chunked[1], begun[1])


def test_convolutions_of_parts_are_those_of_the_whole() -> None:
    channels, lengths = 6, (9, 2)
    x, weight, bias = draw(channels, 11, seed=1), draw(channels, TAPS, seed=2), draw(channels, seed=3)
    pool = torch.full((5, channels, TAPS - 1), 7.0)  # what the slots' last requests left

    def parts(first: int, last: int, fresh: bool) -> Tensor:
        ends = [(min(first, n), min(last, n)) for n in lengths]
        columns = [x[:, [0, 9][i] + s : [0, 9][i] + e] for i, (s, e) in enumerate(ends)]
        return mamba.causal_conv1d_fn_cpu(
            torch.cat(columns, 1),
            weight,
            bias,
            activation="silu",
            conv_states=pool,
            has_initial_state=torch.tensor([not fresh] * 2),
            cache_indices=torch.tensor([2, 4]),
            query_start_loc=starts(tuple(e - s for s, e in ends)),
            seq_lens_cpu=None,
        )

    whole = parts(0, 9, fresh=True)
    kept = pool.clone()
    head, rest = parts(0, 5, fresh=True), parts(5, 8, fresh=False)
    torch.testing.assert_close(torch.cat([head[:, :5], rest], 1), whole[:, :8])
    torch.testing.assert_close(head[:, 5:], whole[:, 9:])
    last = mamba.causal_conv1d_update_cpu(x[:, 8][None], pool, weight, bias, "silu", conv_state_indices=SLOTS[:1] - 1)
    torch.testing.assert_close(last[0], whole[:, 8])
    torch.testing.assert_close(pool, kept)
    with pytest.raises(NotImplementedError, match="one token per request"):
        mamba.causal_conv1d_update_cpu(x[None], pool, weight, bias, "silu", conv_state_indices=SLOTS[:1])


def test_norm_and_gate_of_qwen3_next() -> None:
    def triton(*_: object, **__: object) -> None:
        raise AssertionError("no CPU can launch it")

    x, gate, weight = draw(3, 16, seed=1), draw(3, 16, seed=2), draw(16, seed=3)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    for activation, opened in (("silu", torch.nn.functional.silu(gate)), ("sigmoid", gate.sigmoid())):
        found = hooks.gated_norm(triton, x, gate, weight, None, activation, residual=None, eps=1e-6, prenorm=False)
        torch.testing.assert_close(found, normed * opened)
    output = x.clone()
    hooks.gate_shared_expert(triton, x, weight, gate, output, do_add=True)
    torch.testing.assert_close(output, x + (x @ weight).sigmoid()[:, None] * gate)
    hooks.gate_shared_expert(triton, x, weight, gate, output, do_add=False)
    torch.testing.assert_close(output, (x @ weight).sigmoid()[:, None] * gate)
    with pytest.raises(AssertionError):
        hooks.gated_norm(triton, x, gate, weight, weight, "silu")


def test_the_engine_calls_them_as_they_are_defined() -> None:
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    def keywords(module: object, name: str) -> set[str]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(module)))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = [call for call in calls if ast.unparse(call.func) == name]
        assert found, name
        return {keyword.arg for call in found for keyword in call.keywords if keyword.arg}

    update = inspect.signature(mamba.fused_sigmoid_gating_delta_rule_update).parameters
    of_decode = gdn_triton.TritonGDNKernel.decode  # another call, over trees, is the one that we leave out
    assert keywords(of_decode, "fused_sigmoid_gating_delta_rule_update") <= set(update)
    needed = {"initial_state", "cu_seqlens", "q", "k", "v", "g", "beta"}
    assert needed <= keywords(gdn_triton, "chunk_gated_delta_rule")
    convolve = {"activation", "conv_states", "has_initial_state", "cache_indices", "query_start_loc"}
    assert convolve <= keywords(gdn_backend, "causal_conv1d_fn")
    for path, module in ((hooks.GATED_NORM, fused_norm_gate), (hooks.SHARED_EXPERT_GATE, elementwise)):
        hook = {"rms_norm_gated": hooks.gated_norm, "_launch_fused_gate_sigmoid_mul": hooks.gate_shared_expert}
        name = path.rpartition(".")[2]
        assert path.startswith(module.__name__)
        theirs = list(inspect.signature(getattr(module, name)).parameters)
        ours = [p for p in list(inspect.signature(hook[name]).parameters)[1:] if p != "options"]
        renamed = {"gate": "g"}
        assert [renamed.get(p, p) for p in ours] == [p for p in theirs if p in {renamed.get(o, o) for o in ours}]
