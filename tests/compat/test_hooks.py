"""What the hooks do when SGLang calls through them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from eagle_sglang_cpu import hooks  # noqa: E402


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
