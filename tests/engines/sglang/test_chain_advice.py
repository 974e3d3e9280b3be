"""What a user is told who gave the flags of a chain on a GPU where the plugin serves (sglang/chain_advice.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_flags import SERVED

from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.target_table import SGLANG_CHAINED
from eagle_plugin.policy.shapes import GPU_SHAPE

pytest.importorskip("sglang")

CHAIN = Shape(3, 1, 4)
ADVICE = "leave out --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens"
Arguments = Callable[..., SimpleNamespace]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tiny_eagle3: Path) -> Arguments:
    """Server arguments as a user gave them on a GPU; `resolved`: what SGLang made of some of them."""
    from sglang.srt.arg_groups import model_override_base
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.configs.model_config import AttentionArch

    from eagle_plugin.sglang import preflight

    monkeypatch.setattr(preflight, "may_serve_here", lambda *_: True)
    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: None)

    def make(target: str = "Qwen3MoeForCausalLM", resolved: dict[str, Any] | None = None, **flags: Any) -> Any:
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=[target]),
            attention_arch=AttentionArch.MHA,
            is_encoder_decoder=False,
            head_dim=128,
        )
        sizes = dict(zip(("num_steps", "eagle_topk", "num_draft_tokens"), CHAIN, strict=True))
        values = SERVED | {f"speculative_{name}": size for name, size in sizes.items()}
        values |= dict.fromkeys(
            ("attention_backend", "prefill_attention_backend", "decode_attention_backend"), None
        ) | {"speculative_draft_attention_backend": None, "page_size": None, "device": "cuda"}
        values |= {"model_path": "target", "speculative_draft_model_path": str(tiny_eagle3)}
        values |= {"enable_multi_layer_eagle": False, "lora_backend": "csgmv"} | flags
        chosen = {"attention_backend": "fa3", "page_size": 1} | (resolved or {})
        monkeypatch.setattr(model_override_base, "resolved_view", lambda _: SimpleNamespace(**values | chosen))
        monkeypatch.setattr(model_override_base, "model_config_of", lambda _: config)
        return SimpleNamespace(**values)

    return make


BLACKWELL = {"attention_backend": "trtllm_mha", "page_size": 64}


def test_the_flags_of_a_chain_are_named(given: Arguments) -> None:
    from eagle_plugin.sglang.chain_advice import change_for_trees

    change = change_for_trees(given(), CHAIN)
    assert change is not None and change.startswith(f"{ADVICE}:")
    # Without a topk SGLang chooses another backend there, but for targets whose class has one.
    assert change_for_trees(given(resolved=BLACKWELL), CHAIN) == change
    of_class = change_for_trees(given("GptOssForCausalLM", BLACKWELL), CHAIN)
    assert of_class is not None and of_class.startswith(f"{ADVICE} and add --attention-backend triton:")
    no_flags = change_for_trees(given("GptOssForCausalLM", BLACKWELL, speculative_eagle_topk=None), CHAIN)
    assert no_flags is not None and no_flags.startswith("add --attention-backend triton:")


def test_no_advice_where_it_would_not_help(given: Arguments) -> None:
    from eagle_plugin.sglang.chain_advice import change_for_trees

    assert change_for_trees(given(speculative_eagle_topk=2), GPU_SHAPE) is None
    assert change_for_trees(given(speculative_eagle_topk=None), CHAIN) is None  # it is the plugin's own choice
    assert change_for_trees(given(device="cpu"), CHAIN) is None
    assert change_for_trees(given(speculative_algorithm="DFLASH"), CHAIN) is None
    assert change_for_trees(given(page_size=64), CHAIN) is None
    assert change_for_trees(given(attention_backend="trtllm_mha", resolved=BLACKWELL), CHAIN) is None


def test_the_classes_are_those_of_the_engine() -> None:
    """For which an override of the installed SGLang chooses trtllm_mha, but those that the plugin does not serve."""
    import sglang

    folder = Path(sglang.__file__).parent / "srt" / "arg_groups" / "model_overrides"
    found: set[str] = set()
    for file in folder.glob("*.py"):
        text = file.read_text("utf-8")
        for names, body in re.findall(r"@_register_for\(([^)]*)\)(.*?)(?=@_register_for|\Z)", text, re.DOTALL):
            if re.search(r'(= |else \(|\()"trtllm_mha"', body):
                found |= set(re.findall(r'"(\w+)"', names))
    # Sparse attention, layers that keep a state, and targets without drafts.
    others = ("MiniMax", "NemotronH", "Qwen", "InternS2", "DiffusionGemma")
    assert {name for name in found if not name.startswith(others)} == SGLANG_CHAINED


def test_doctor_names_the_change(given: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    from eagle_plugin.runtime.verdict import Verdict
    from eagle_plugin.sglang import block_flags, doctor, support

    arguments = given()
    monkeypatch.setattr(runtime_context, "publish", lambda *_, **__: None)
    monkeypatch.setattr(doctor, "PlannedRunner", lambda *_: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(support, "unsupported_settings", lambda *_: [])
    monkeypatch.setattr(support, "unsupported_devices", lambda *_: [])
    monkeypatch.setattr(block_flags, "caps_of", lambda _: CHAIN)
    monkeypatch.setattr(doctor, "open_points", lambda *_: [])
    monkeypatch.setattr(doctor, "_launch", lambda *_: None)
    monkeypatch.setattr(doctor, "costs_of", lambda _: [])
    monkeypatch.setattr(doctor.loader, "backend", lambda _: "native")
    verdict = Verdict("SGLang", "0", "engine", "")
    doctor._decide(verdict, arguments, arguments, [])
    assert verdict.serves == "plugin" and verdict.changes[0].startswith(ADVICE)


def test_the_log_of_the_start_names_the_change(
    given: Arguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eagle_plugin.sglang import eagle3_model, finish, metrics, refused_requests, selftest, support

    class Worker:
        shape, device, synthetic = CHAIN, "cpu", None
        draft_worker = SimpleNamespace(is_own_layer=False)

        def __init__(self, **_: Any) -> None: ...

    monkeypatch.setattr(support, "rank_logger", lambda logger: logger)
    monkeypatch.setattr(support, "unsupported_reasons", lambda *_: [])
    monkeypatch.setattr(selftest, "failed_kernels", lambda _: [])
    monkeypatch.setattr(support, "worker_class", lambda _: Worker)
    for module, name in (
        (eagle3_model, "register"),
        (metrics, "count_rounds"),
        (finish, "finish_in_order"),
        (refused_requests, "refuse_requests"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    caplog.set_level("INFO", "eagle_plugin")
    target = SimpleNamespace(model_runner=SimpleNamespace(device="cuda"))
    support.worker_factory("EAGLE3", Worker)(given(), 0, 1, target).announce([])
    served, advice = caplog.messages[-2:]
    assert "(at most 3 steps, 1 children per node" in served and advice.startswith(f"eagle-plugin: {ADVICE}")
