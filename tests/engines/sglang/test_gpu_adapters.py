"""LoRA as on a GPU: forwards of the target that were captured read the adapters of each round."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_gpu_adapters
import torch
from adapter_requests import PROMPTS, adapted, ask, check_that_adapters_count, post
from serving import GRAPHS, accept_length, responses, serving, tiny_spec

pytest.importorskip("sglang")
from eagle_sglang_cpu.adapters import Unpinned
from sglang.srt.lora.backend import chunked_backend
from sglang.srt.lora.lora_manager import LoRAManager

from eagle_plugin.sglang.adapters import Adapters, unsupported_adapters
from eagle_plugin.sglang.doctor import open_points


@pytest.mark.server
@pytest.mark.matrix  # beside the tests below, and vLLM's of the same rounds
@pytest.mark.parametrize("control", [False, True])
def test_captured_rounds_with_adapters(control: bool, tmp_path: Path) -> None:
    """SGLang's backend of GPUs, with trees of changing shapes, against plain decoding by that of CPUs.

    The control: captured rounds for which nothing is prepared.
    """
    models, prompts = adapted(tmp_path), PROMPTS[:6]
    flags = (*models.flags, "--max-running-requests", "4")
    environment = GRAPHS | sglang_gpu_adapters.install(tmp_path / "plugin", control)
    specs = [
        tiny_spec(models.target, extra_flags=flags),
        tiny_spec(models.target, models.head, (3, 4, 20), extra_flags=flags, environment=environment),
    ]
    with serving(specs, tmp_path / "logs") as (plain, plugin):
        for server in (plain, plugin):
            post(server, "load_lora_adapter", {"lora_name": "third", "lora_path": str(models.third)})
        expected = responses(ask(plain, prompts=prompts))
        check_that_adapters_count(expected)
        answers = ask(plugin, prompts=prompts)
        if control:
            assert responses(answers) != expected
            return
        assert responses(answers) == expected
        assert accept_length(answers) > 1.2


CAPS, MOST, PLACES = 20, 8, 3  # nodes, requests, adapters of a batch
RANKS = {"first": 4, "second": 8}


def served(device: str, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    """SGLang's manager and its backend of GPUs, with two adapters, over tensors of this device."""
    monkeypatch.setattr(
        chunked_backend, "get_lora", lambda: SimpleNamespace(max_lora_chunk_size=64, lora_drain_wait_threshold=0)
    )
    manager = LoRAManager.__new__(LoRAManager)
    manager.lora_backend = chunked_backend.ChunkedSgmvLoRABackend(
        max_loras_per_batch=PLACES, device=torch.device(device), server_args=SimpleNamespace(max_lora_chunk_size=64)
    )
    manager.attn_dp_enabled, manager.max_loras_per_batch, manager.device = False, PLACES, torch.device(device)
    places = {None: 0, "first": 1, "second": 2}
    manager.memory_pool = SimpleNamespace(uid_to_buffer_id=places, get_buffer_id=places.get)
    manager.loras = {name: SimpleNamespace(config=SimpleNamespace(r=rank), scaling=1.0) for name, rank in RANKS.items()}
    monkeypatch.setattr(manager, "fetch_new_loras", lambda names: None)
    adapters = Adapters(SimpleNamespace(lora_manager=manager))
    adapters.use_static_memory(MOST, CAPS)
    return adapters


def requests(*names: str | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(lora_id=name) for name in names]


@pytest.mark.parametrize("width", [1, 2, 5, 16, 17, CAPS])
def test_rows_have_the_adapter_of_their_request(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that stays where it is, for every width and size of a batch; padding has none."""
    adapters, drawn = served("cpu", monkeypatch), random.Random(width)
    backend = adapters._manager.lora_backend
    addresses = set()
    for padded_b in (1, 2, 4, 8, 8, 4):
        names = drawn.choices([None, *RANKS], k=max(1, padded_b - 1))
        with Unpinned():
            adapters.prepare(requests(*names), width, padded_b)
        info = backend.batch_info
        assert info.use_cuda_graph and info.num_segments <= len(info.weight_indices)
        found: dict[int, int] = {}
        for i, adapter in enumerate(info.weight_indices.tolist()):
            first, last = info.seg_indptr[i : i + 2].tolist()
            assert last - first <= info.max_len
            found |= dict.fromkeys(info.permutation[first:last].tolist(), adapter)
        padded = names + [None] * (padded_b - len(names))
        expected = [[None, *RANKS].index(name) for name in padded for _ in range(width)]
        assert [found[row] for row in range(padded_b * width)] == expected and len(found) == len(expected)
        assert [info.lora_ranks[expected[i]] for i in range(len(expected))] == [
            RANKS.get(n, 0) for n in padded for _ in range(width)
        ]
        tensors = (info.weight_indices, info.seg_indptr, info.permutation, info.lora_ranks, info.scalings)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(addresses) == 1


def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is read of tensors that have none."""
    adapters = served("meta", monkeypatch)
    with Unpinned():
        for width in (1, 5, CAPS):
            adapters.prepare(requests("first", None, "second"), width, 4)
            assert adapters._manager.lora_backend.batch_info.permutation.device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):  # the control
        int(adapters._manager.lora_backend.batch_info.seg_indptr[-1])


def test_what_a_gpu_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = served("cpu", monkeypatch)._manager
    for device, reasons in (("cuda", []), ("cpu", [])):
        assert unsupported_adapters(SimpleNamespace(lora_manager=manager, device=device)) == reasons
    manager.lora_backend.is_moe_lora = True
    (reason,) = unsupported_adapters(SimpleNamespace(lora_manager=manager, device="cuda"))
    assert reason.startswith("--enable-lora: adapters of experts")
    manager.lora_backend = SimpleNamespace(name="triton", is_moe_lora=False)
    (reason,) = unsupported_adapters(SimpleNamespace(lora_manager=manager, device="cuda"))
    assert reason.startswith("--lora-backend triton: ")
    assert unsupported_adapters(SimpleNamespace(lora_manager=manager, device="cpu")) == []
    assert unsupported_adapters(SimpleNamespace(lora_manager=None, device="cuda")) == []


def test_doctor_names_as_open_what_only_loaded_adapters_show() -> None:
    config, arguments = SimpleNamespace(quantization=None), SimpleNamespace(quantization=None)
    for device, manager, is_open in (("cuda", object(), True), ("cuda", None, False), ("cpu", object(), False)):
        runner: Any = SimpleNamespace(model_config=config, lora_manager=manager, device=device)
        assert any("changes experts" in point for point in open_points(arguments, runner)) == is_open
