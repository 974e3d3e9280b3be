"""What the hooks do when SGLang calls through them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from eagle_sglang_cpu import adapters, hooks  # noqa: E402


def fallback(view):
    return {"attention_backend": "the engine's answer"}


@pytest.mark.parametrize(
    "device, backend, latent, kept",
    [
        ("cpu", "intel_amx", False, True),
        ("cpu", "intel_amx", True, False),  # MLA stays with torch_native
        ("cpu", "torch_native", False, False),
        ("cuda", "intel_amx", False, False),
    ],
)
def test_only_plain_attention_on_a_cpu_keeps_intel_amx(monkeypatch, device, backend, latent, kept):
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "use_mla_backend", lambda view: latent)
    view = SimpleNamespace(device=device, attention_backend=backend)
    assert hooks.keep_intel_amx(fallback, view) == ({} if kept else fallback(view))


@pytest.mark.parametrize(("device", "served"), [("cpu", False), ("cuda", True)])
def test_a_prefix_cache_with_extra_buffers_is_not_chosen_on_a_cpu(device, served):
    import pkgutil

    assert hooks.extra_buffer_is_served(lambda view, config: True, SimpleNamespace(device=device), None) is served
    assert not hooks.extra_buffer_is_served(lambda view, config: False, SimpleNamespace(device=device), None)
    assert callable(pkgutil.resolve_name(hooks.EXTRA_BUFFER))


@pytest.mark.parametrize("with_hidden", [True, False])
def test_rows_are_gathered_by_index_on_a_cpu(with_hidden):
    buffers = [
        torch.randn(6, 4),
        torch.randint(0, 9, (6, 4)),
        torch.arange(6),
        torch.randn(6, 8) if with_hidden else None,
    ]
    indices = torch.tensor([4, 0, 4])
    found = hooks.gather_rows(None, indices, *buffers)
    for buffer, rows in zip(buffers, found, strict=True):
        assert rows is None if buffer is None else rows.tolist() == [buffer[i].tolist() for i in (4, 0, 4)]


def test_other_devices_keep_the_kernel_of_the_engine():
    indices = torch.zeros(2, dtype=torch.int64, device="meta")
    assert hooks.gather_rows(lambda *args: ("engine", len(args)), indices, 1, 2, 3, None) == ("engine", 5)


def test_compiled_functions_run_as_they_were_written():
    def backend(graph, inputs):
        raise AssertionError("compiled")

    def double(x, *, plus=0):
        return 2 * x + plus

    compiled = torch.compile(double, backend=backend)
    assert hooks.run_uncompiled(compiled, torch.tensor(3), plus=1).item() == 7
    with pytest.raises(Exception, match="compiled"):
        compiled(torch.tensor(3))


def chain(*args):
    return "the engine's chain"


def layer(kind, **attributes):
    """A layer of the engine's class without its constructor, which wants a running server."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


@pytest.mark.parametrize("variant", [None, "cast_x_before_out_mul", "fp32_residual", "variance_size_override"])
def test_the_ordinary_norm_is_fused_and_its_variants_are_not(variant):
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

    ordinary = {
        "hidden_size": 64,
        "weight": torch.ones(64),
        "variance_epsilon": 1e-5,
        "variance_size_override": None,
        "cast_x_before_out_mul": False,
        "fp32_residual": False,
        "override_orig_dtype": None,
    }
    x = torch.randn(3, 64)
    norm = layer(RMSNorm, **(ordinary | ({variant: 16} if variant else {})))
    found = hooks.fused_rms_norm(chain, norm, x)
    if variant:
        assert found == chain()
    else:
        torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (64,), eps=1e-5))
    assert hooks.fused_rms_norm(chain, layer(GemmaRMSNorm, **ordinary), x) == chain()
    assert hooks.fused_rms_norm(chain, norm, x, x, x) == chain()


def test_the_ordinary_rotation_is_fused_and_others_are_not():
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    angles = torch.rand(10, 16)
    attributes = {"is_neox_style": True, "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1), "head_size": 32}
    q, k, positions = torch.randn(2, 64), torch.randn(2, 32), torch.tensor([3, 7])
    turned, _ = hooks.fused_rotary(chain, layer(RotaryEmbedding, **attributes), positions, q, k)
    assert turned.norm() == pytest.approx(q.norm()) and not torch.equal(turned, q)
    interleaved = layer(RotaryEmbedding, **(attributes | {"is_neox_style": False}))
    assert hooks.fused_rotary(chain, interleaved, positions, q, k) == chain()

    class Scaled(RotaryEmbedding):
        def forward_native(self, *args):
            raise AssertionError

    assert hooks.fused_rotary(chain, layer(Scaled, **attributes), positions, q, k) == chain()


def test_silu_is_fused_where_the_sizes_allow():
    x = torch.randn(2, 64)
    torch.testing.assert_close(
        hooks.fused_silu_and_mul(chain, None, x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    )
    assert hooks.fused_silu_and_mul(chain, None, torch.randn(2, 6)) == chain()


def test_memory_of_adapters_is_not_pinned():
    def prepare(values, *, pin_memory=True):
        made = torch.tensor(values, dtype=torch.int32, pin_memory=pin_memory), torch.zeros(2, pin_memory=pin_memory)
        return [*made, made[0].pin_memory()]

    first, second, third = adapters.without_pinning(prepare, [4, 5])
    assert first.tolist() == third.tolist() == [4, 5] and second.tolist() == [0, 0] and first.dtype == torch.int32
    assert not any(made.is_pinned() for made in (first, second, third))
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match="pin"):  # the control: as the engine does it
            prepare([4, 5])


@pytest.mark.parametrize("asked", ["csgmv", "triton", "torch_native"])
def test_adapters_are_computed_by_torch(asked, caplog):
    caplog.set_level("INFO", logger=adapters.logger.name)
    started = []
    adapters.start_with_torch(lambda *args, **kwargs: started.append((args, kwargs)), 1, lora_backend=asked, rank=2)
    assert started == [((1,), {"lora_backend": "torch_native", "rank": 2})]
    assert (asked in caplog.text) == (asked != "torch_native")


def test_the_engine_starts_adapters_as_the_hook_expects():
    import inspect

    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.model_runner import ModelRunner

    assert all(callable(getattr(LoRAManager, name)) for name in adapters.PINNING)
    assert f"{LoRAManager.__module__}.{LoRAManager.__name__}" == adapters.MANAGER
    assert "lora_backend=get_lora().lora_backend" in inspect.getsource(ModelRunner.init_lora_manager)
