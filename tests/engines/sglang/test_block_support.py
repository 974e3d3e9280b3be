"""Which block drafters the plugin serves in SGLang, which it leaves to SGLang, and which no worker serves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_models import tiny_dflash
from dspark_models import tiny_dspark
from head_edits import Edit, config, drop, put
from tiny_checkpoints import read_config

pytest.importorskip("sglang")
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang_flags import SERVED

from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.runtime.startup import LEFT
from eagle_plugin.sglang import block_flags, block_support, preflight, support

BLOCK = 8
FLAGS = SERVED | {
    "speculative_algorithm": "DFLASH",
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "speculative_dflash_block_size": None,
    "max_running_requests": None,
    "disable_overlap_schedule": False,
}


@pytest.fixture
def drafter(tiny_target: Path, tmp_path: Path) -> Path:
    return tiny_dflash(tmp_path / "drafter", tiny_target, block=BLOCK)


def arguments(target: Path, head: Path, **flags: Any) -> SimpleNamespace:
    folders = {"model_path": str(target), "speculative_draft_model_path": str(head)}
    return SimpleNamespace(**FLAGS | folders | flags)


def resolve(made: SimpleNamespace) -> None:
    """As SGLang resolves them on a CPU, with our hook."""

    def original(_: Any) -> None:
        raise ValueError("only with a GPU")

    preflight.resolve_block_flags(original, made)
    preflight.check_launch(made)


@pytest.mark.parametrize(
    ("flags", "caps"),
    [
        ({}, Shape(7, 4, 8)),
        ({"speculative_num_draft_tokens": 32}, Shape(7, 4, 32)),  # a wider tree, and no longer block
        ({"speculative_dflash_block_size": 32, "speculative_num_steps": 9}, Shape(7, 4, 32)),
        (
            {"speculative_num_draft_tokens": 32, "speculative_num_steps": 3, "speculative_eagle_topk": 2},
            Shape(3, 2, 32),
        ),
        (
            {"speculative_num_draft_tokens": 64, "speculative_num_steps": 20, "speculative_eagle_topk": 1},
            Shape(7, 1, 8),
        ),
        ({"speculative_num_draft_tokens": 5}, Shape(4, 4, 5)),
    ],
)
def test_shapes(flags: dict[str, int], caps: Shape, tiny_target: Path, drafter: Path) -> None:
    """The engine itself counts with one step and one child, as on a GPU."""
    made = arguments(tiny_target, drafter, **flags)
    resolve(made)
    found = resolved_view(made)
    assert (found.speculative_num_steps, found.speculative_eagle_topk) == (1, 1)
    assert found.max_running_requests == 48 and found.disable_overlap_schedule
    assert block_flags.block_shape(made, found.speculative_num_draft_tokens, read_config(drafter)) == caps
    assert LEFT not in os.environ


def test_a_block_that_is_cut_is_told(tiny_target: Path, drafter: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve(arguments(tiny_target, drafter, speculative_num_draft_tokens=5))
    assert "block_size 8, and --speculative-num-draft-tokens 5 makes blocks of 5 tokens" in caplog.text
    assert "from --speculative-num-draft-tokens 8 on" in caplog.text


def test_tables_that_sglang_does_not_read_are_told(
    tiny_target: Path, drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put("lm_head.weight", torch.zeros(512, 64))(drafter)
    resolve(arguments(tiny_target, drafter))
    assert "has lm_head.weight, which SGLang's class does not read" in caplog.text


def options(**values: Any) -> Edit:
    """Change keys of dflash_config."""

    def edit(folder: Path) -> None:
        config(dflash_config=read_config(folder)["dflash_config"] | values)(folder)

    return edit


LEFT_TO_SGLANG: dict[str, tuple[Edit, str]] = {
    "sliding windows": (
        config(layer_types=["sliding_attention"] * 2, sliding_window=64, use_sliding_window=True),
        "layers with sliding windows",
    ),
    "a selector": (config(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
    "a Domino projector": (options(projector_type="domino"), "projector_type in dflash_config"),
    "convolutions": (options(conv_kernel_size=3, conv_group_size=4), "conv_kernel_size in dflash_config"),
    "a mask by its text": (options(mask_token_id=None), "mask_token_id None, wanted a whole number"),
    "layers by default": (options(target_layer_ids=None), "no target_layer_ids, wanted them in dflash_config"),
    "the last layer": (options(target_layer_ids=[1, 3, 6]), "target_layer_ids with 6"),
    "a pickled mask": (lambda folder: (folder / "mask_embedding.pt").write_bytes(b""), "mask_embedding.pt"),
    "a config.json of speculators": (
        config(speculators_model_type="dflash", transformer_layer_config={}), "speculators_model_type dflash",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_TO_SGLANG)
def test_left_to_sglang(case: str, tiny_target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; on a CPU SGLang has nobody to serve it."""
    edit, named = LEFT_TO_SGLANG[case]
    edit(drafter)
    monkeypatch.setenv(LEFT, "")
    monkeypatch.setenv("EAGLE_PLUGIN", "force")
    preflight.check_launch(arguments(tiny_target, drafter, device="cuda", speculative_num_draft_tokens=8))
    assert named in os.environ[LEFT]
    with pytest.raises(SystemExit, match=f"{named}.*{block_support.GPUS_ONLY}"):
        resolve(arguments(tiny_target, drafter))


REFUSED: dict[str, tuple[Edit, str]] = {
    "another vocabulary": (config(vocab_size=400), "vocab_size 400"),
    "a mask outside": (options(mask_token_id=512), "mask_token_id 512, wanted 0 to 511"),
    "layers of another number": (options(target_layer_ids=[1, 3]), "fc.weight of shape"),
    "a missing tensor": (drop("layers.1.self_attn.k_norm.weight"), "not layers.1.self_attn.k_norm.weight"),
    "an EAGLE-3 head": (
        config(architectures=["LlamaForCausalLMEagle3"], dflash_config=...),
        "no block drafter, but --speculative-algorithm is DFLASH",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_every_worker(case: str, tiny_target: Path, drafter: Path) -> None:
    edit, named = REFUSED[case]
    edit(drafter)
    with pytest.raises(SystemExit, match=f"^eagle-plugin: .*{named}"):
        resolve(arguments(tiny_target, drafter))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"tp_size": 2}, "--tp-size 2: it is not served with block drafters yet"),
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size 64"),
        ({"enable_lora": True}, "--enable-lora True"),
        ({"pp_size": 2}, "--pp-size 2: pipeline parallelism"),
        ({"speculative_num_steps": 9, "speculative_eagle_topk": 9}, "(steps - 1) * topk may be at most 64"),
    ],
)
def test_flags_that_are_left(
    flags: dict[str, Any], named: str, tiny_target: Path, drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU SGLang's own refusal follows our reason."""
    with pytest.raises(ValueError, match="only with a GPU"):
        resolve(arguments(tiny_target, drafter, **flags))
    assert named in caplog.text


def test_on_a_gpu_sglang_resolves_the_flags(tiny_target: Path, drafter: Path) -> None:
    made, called = arguments(tiny_target, drafter, device="cuda"), []

    def original(given: Any) -> None:
        called.append(given)
        declare_resolution(given, "test", speculative_num_draft_tokens=16)

    preflight.resolve_block_flags(original, made)
    assert called == [made] and resolved_view(made).speculative_num_draft_tokens == 16


def test_gpus_are_left_to_sglang_unless_forced(
    tiny_target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = arguments(tiny_target, drafter, device="cuda")
    (reason,) = block_support.unsupported_block_flags(made, made)
    assert reason == ("GPUs: none has run block drafters with the plugin's worker yet; EAGLE_PLUGIN=force tries it")
    monkeypatch.setenv("EAGLE_PLUGIN", "force")
    assert block_support.unsupported_block_flags(made, made) == []


def test_targets_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda config: None)

    def reasons(head: str = "DFlashDraftModel", algorithm: str = "DFLASH", **values: Any) -> list[str]:
        draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=[head]))
        hf = SimpleNamespace(architectures=["Qwen3VLForConditionalGeneration"])
        runner = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf, **{"is_multimodal": False} | values),
            spec_aux_config=SimpleNamespace(draft_model_config=draft),
        )
        flags = SimpleNamespace(**FLAGS | {"speculative_algorithm": algorithm})
        return block_support.unsupported_block_drafters(flags, flags, runner)

    assert reasons() == reasons(algorithm="EAGLE3", is_multimodal=True) == []
    assert reasons(is_multimodal=True) == [
        "target Qwen3VLForConditionalGeneration: it is not served with block drafters yet"
    ]
    assert reasons("Qwen3DSparkModel") == []
    assert reasons("DFlash2DraftModel") == [
        "block drafter DFlash2DraftModel: only DFlashDraftModel and Qwen3DSparkModel are served yet"
    ]


def test_a_block_drafter_under_another_algorithm_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda config: None)
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]), is_encoder_decoder=False, attention_arch=None
    )
    sampler = type("Sampler", (), {})()
    for algorithm, count in ((SpeculativeAlgorithm.DFLASH, 0), (SpeculativeAlgorithm.EAGLE3, 1)):
        runner = SimpleNamespace(
            model_config=config,
            model=SimpleNamespace(modules=list),
            sampler=sampler,
            spec_algorithm=algorithm,
        )
        assert len(support.unsupported_models(runner, "DFlashDraftModel")) == count


def test_on_a_cpu_what_is_not_served_ends_the_start() -> None:
    block_support.refuse_on_a_cpu("DFLASH", "cuda", ["a"])
    block_support.refuse_on_a_cpu("EAGLE3", "cpu", ["a"])
    with pytest.raises(SystemExit, match=f"^eagle-plugin: a; b; {block_support.GPUS_ONLY}"):
        block_support.refuse_on_a_cpu("DFLASH", "cpu", ["a", "b"])


def test_the_worker_is_ours_for_both_classes_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from eagle_plugin.sglang import plugin
    from eagle_plugin.sglang.block_worker import BlockWorker

    monkeypatch.setattr(support, "worker_factory", lambda name, engine_worker: (name, engine_worker))
    caplog.set_level("INFO", "eagle_plugin")
    found = plugin._create_worker(lambda algorithm, _: DFlashWorkerV2, SpeculativeAlgorithm.DFLASH, None)
    assert found == ("DFLASH", DFlashWorkerV2) and "is served by" not in caplog.text
    assert (
        plugin._create_worker(lambda algorithm, _: DFlashWorkerV2, SpeculativeAlgorithm.DSPARK, None) is DFlashWorkerV2
    )
    (line,) = [line for line in caplog.messages if "is served by" in line]
    assert "DSPARK is served by SGLang's own worker: DFlashWorkerV2 is not a worker that the plugin replaces" in line
    assert block_support.worker_class("DFLASH") is BlockWorker


def test_a_block_costs_the_same_in_every_draft() -> None:
    assert Levels.BLOCK.depth_is_free
    assert [Levels.BLOCK.forwards(Shape(steps, 4, 8)) for steps in (1, 7)] == [(1, 1), (1, 1)]
    assert Levels.BLOCK.forwards(Shape(0, 1, 1)) == (1, 0)
    assert json.loads(json.dumps(Levels.BLOCK)) == "block"


@pytest.fixture
def markov(tiny_target: Path, tmp_path: Path) -> Path:
    return tiny_dspark(tmp_path / "markov", tiny_target, block=BLOCK)


def markov_arguments(target: Path, head: Path, **flags: Any) -> SimpleNamespace:
    named = {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": None}
    return arguments(target, head, **named | flags)


@pytest.mark.parametrize(
    ("flags", "anchor", "caps"),
    [
        ({}, True, Shape(8, 4, 9)),
        ({}, False, Shape(7, 4, 8)),
        ({"speculative_dspark_block_size": 5}, True, Shape(5, 4, 6)),
        ({"speculative_num_draft_tokens": 32}, True, Shape(8, 4, 32)),
    ],
)
def test_a_markov_head_on_a_cpu(
    flags: dict[str, int], anchor: bool, caps: Shape, tiny_target: Path, markov: Path
) -> None:
    """SGLang plans it as DFLASH, which is what its own worker could not be on a CPU."""
    config(sample_from_anchor=anchor)(markov)
    made = markov_arguments(tiny_target, markov, **flags)
    resolve(made)
    found = resolved_view(made)
    assert found.speculative_algorithm == "DFLASH"
    assert block_flags.asked_algorithm(made, found.speculative_algorithm) == "DSPARK"
    assert block_flags.block_shape(made, found.speculative_num_draft_tokens, read_config(markov)) == caps
    assert LEFT not in os.environ


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (config(markov_head_type="gated"), "markov_head_type gated: only vanilla.*on GPUs only"),
        (config(architectures=["Gemma4DSparkModel"]), "only dflash and dspark are served.*on GPUs only"),
        (config(markov_rank=...), "markov_rank None, wanted a positive whole number"),
        (put("markov_head.markov_w2.weight", torch.zeros(400, 16)), "markov_w2.weight of shape"),
    ],
)
def test_a_markov_head_that_is_not_served(edit: Edit, named: str, tiny_target: Path, markov: Path) -> None:
    edit(markov)
    with pytest.raises(SystemExit, match=f"^eagle-plugin: .*{named}"):
        resolve(markov_arguments(tiny_target, markov))


def test_the_algorithm_of_the_other_kind(tiny_target: Path, drafter: Path, markov: Path) -> None:
    with pytest.raises(SystemExit, match="is a dspark drafter, but --speculative-algorithm is DFLASH"):
        resolve(arguments(tiny_target, markov))
    with pytest.raises(SystemExit, match="is a dflash drafter, but --speculative-algorithm is DSPARK"):
        resolve(markov_arguments(tiny_target, drafter))


def test_on_a_gpu_sglangs_own_worker_serves_markov_heads(tiny_target: Path, markov: Path) -> None:
    made, called = markov_arguments(tiny_target, markov, device="cuda"), []
    preflight.resolve_block_flags(called.append, made)
    preflight.check_launch(made)
    assert called == [made] and resolved_view(made).speculative_algorithm == "DSPARK" and LEFT not in os.environ
