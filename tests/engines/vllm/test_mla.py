"""Targets with latent attention (MLA): text of draft trees is that of plain decoding, and what is not served.

All kinds of heads, sampled text and aborted requests: test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_models import family_head, family_target
from tiny_checkpoints import read_config, write_config
from torch import Tensor
from vllm import LLM
from vllm.config import CompilationMode, VllmConfig
from vllm_configs import configure, needs
from vllm_engines import engine, generate, random_shapes, rounds, runner
from vllm_requests import make_prompts

from eagle_plugin.vllm import latent_attention, latent_limits, unsupported
from eagle_plugin.vllm.accepted_tokens import CacheGroup
from eagle_plugin.vllm.attention import TreeMetadata
from eagle_plugin.vllm.cache_layout import CacheRows

MATRIX = pytest.mark.matrix
FAMILY = "deepseek_v3"
TOKENS = 48
PROMPTS = make_prompts(12)
TREES: dict[str, Any] = {"depth": 3, "topk": 8, "nodes": 32}


@pytest.fixture(autouse=True)
def _without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there is one more reason on some machines: `test_amx`."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


class Models(NamedTuple):
    target: Path
    head: Path
    expected: list[list[int]]  # answers to PROMPTS of plain decoding


def answers(target: Path) -> list[list[int]]:
    with engine(target) as llm:
        return generate(llm, PROMPTS, max_tokens=TOKENS)


def check(llm: LLM, expected: list[list[int]]) -> None:
    before = rounds(llm)
    assert generate(llm, PROMPTS, max_tokens=TOKENS) == expected
    count, tokens = rounds(llm, before)
    assert tokens / count > 1.2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("latent")
    target = family_target(folder / "target", FAMILY)
    return Models(target, family_head(folder / "head", target), answers(target))


@pytest.fixture(scope="module")
def trees(models: Models) -> Iterator[LLM]:
    with engine(models.target, models.head, max_num_batched_tokens=32, **TREES) as llm:  # less than a prompt
        yield llm


def test_text_equals_plain_decoding(models: Models, trees: LLM) -> None:
    """vLLM itself does not start with such a pair on a CPU: its kernels for the two want blocks of different sizes."""
    assert len({tuple(answer) for answer in models.expected}) > len(PROMPTS) * 0.8
    check(trees, models.expected)
    with random_shapes(trees) as shapes:
        check(trees, models.expected)
    assert len(shapes) > 6
    layers = runner(trees).compilation_config.static_forward_context
    latent = latent_attention.latent_names(layers)
    assert {tuple(layers[name].kv_cache.shape[1:]) for name in latent} == {(16, 576)}
    own = runner(trees).drafter._draft_attn_layer_names  # whose keys and values are in blocks of as many tokens
    assert {tuple(layers[name].kv_cache.shape[1:]) for name in own} == {(2, 16, 64)}


def other_values(attend: Callable[..., None]) -> Callable[..., None]:
    def faulty(query: Tensor, cache: CacheRows, *rest: Any) -> None:
        attend(query, cache._replace(values=cache.keys[..., -cache.values.shape[2] :]), *rest)

    return faulty


def no_rotary_part(attend: Callable[..., None]) -> Callable[..., None]:
    def faulty(query: Tensor, cache: CacheRows, *rest: Any) -> None:
        attend(query * (torch.arange(query.shape[2]) < cache.values.shape[2]), cache, *rest)

    return faulty


def all_of_the_tree(attend: Callable[..., None]) -> Callable[..., None]:
    """Every node sees all nodes before it, as of a chain."""

    def faulty(query: Tensor, cache: CacheRows, metadata: TreeMetadata, *rest: Any) -> None:
        tree = metadata.rows.tree
        assert tree is not None
        chain = (torch.ones_like(tree.ancestors).cumsum(1) + 1).clamp(max=62)
        rows = metadata.rows._replace(tree=tree._replace(ancestors=(1 << chain) - 1))
        attend(query, cache, TreeMetadata(rows, metadata.slot_table, metadata.slots), *rest)

    return faulty


@pytest.mark.parametrize("fault", [other_values, no_rotary_part, all_of_the_tree, "rows are not moved"])
def test_a_fault_shows(fault: Any, models: Models, trees: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: of the attention over trees alone, and of what is left of an accepted path."""
    if callable(fault):
        monkeypatch.setattr(latent_attention, "attend_trees", fault(latent_attention.attend_trees))
    else:
        monkeypatch.setattr(CacheGroup, "move_accepted", lambda *_: None)
    found = generate(trees, PROMPTS, max_tokens=TOKENS // 2)
    assert sum(a != b[: TOKENS // 2] for a, b in zip(found, models.expected, strict=True)) > len(PROMPTS) // 3


@MATRIX
def test_measured_costs_and_a_tested_round(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and the round are tested before the first request, and the policy chooses by what rounds cost."""
    monkeypatch.setenv("EAGLE_SELFTEST", "1")
    head = family_head(tmp_path / "head", models.target, "eagle2")
    with engine(models.target, head, policy="auto", **TREES) as llm:
        assert runner(llm)._shapes.chooser.policy is not None
        for _ in range(2):
            assert generate(llm, PROMPTS, max_tokens=TOKENS) == models.expected


# ---------------------------------------------------------------------------------------------------------------------
# What is left to vLLM


def with_rope(**changes: Any) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        config.model_config.hf_text_config.rope_parameters |= changes

    return change


def sparse(config: VllmConfig) -> None:
    config.model_config.hf_text_config.index_topk = 64


LEFT: list[tuple[Callable[[VllmConfig], None], str]] = [
    (needs("device_config", "device_type", "cuda"), "served on CPUs only yet"),
    (needs("cache_config", "cache_dtype", "fp8"), "--kv-cache-dtype fp8: it is not served with latent"),
    (needs("parallel_config", "tensor_parallel_size", 2), "--tensor-parallel-size: it is not served with target Deep"),
    (lambda config: object.__setattr__(config, "lora_config", object()), "--enable-lora: it is not served with target"),
    (with_rope(rope_type="default"), "rotary embedding default of latent"),
    (with_rope(rope_type="deepseek_yarn", attention_factor=1.0), "rotary embedding deepseek_yarn of latent"),
    (needs("compilation_config", "mode", CompilationMode.DYNAMO_TRACE_ONCE), "with --enforce-eager it is"),
    (sparse, "sparse latent (DSA) attention is not served yet"),
]


@pytest.fixture
def config(models: Models, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    monkeypatch.setenv("EAGLE_PLUGIN", "0")
    made = configure(models.target, models.head)
    assert unsupported.unsupported_reasons(made) == []
    return made


@pytest.mark.parametrize(("change", "named"), LEFT, ids=[named for _, named in LEFT])
def test_what_is_left_to_vllm(change: Callable[[VllmConfig], None], named: str, config: VllmConfig) -> None:
    change(config)
    assert [named in reason for reason in latent_reasons(config)] == [True]


def test_a_step_has_room_for_the_longest_prompt(models: Models) -> None:
    """vLLM's limit of a step would be 32 tokens, and longer prompts would wait for ever."""
    scheduler = configure(models.target, models.head, max_num_batched_tokens=32).scheduler_config
    assert not scheduler.enable_chunked_prefill
    assert scheduler.max_num_scheduled_tokens == scheduler.max_num_batched_tokens >= 128


def latent_reasons(config: VllmConfig) -> list[str]:
    return [why for found, why in latent_limits.unserved_latent(config) if found]


def test_amx(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes other kernels and another cache on such a CPU, unless it is told not to."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    (reason,) = latent_reasons(config)
    assert "AMX" in reason and "--attention-backend CPU_MLA" in reason
    config.attention_config.backend = support_backend("CPU_MLA")
    assert latent_reasons(config) == []


def support_backend(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def test_other_targets_have_no_such_limits(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(config.model_config), "use_mla", False)
    assert latent_limits.unserved_latent(config) == ()


def test_a_checkpoint_without_yarn(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its config.json says it: vLLM's own worker is left in place."""
    target = family_target(tmp_path / "target", FAMILY)
    values = read_config(target)
    write_config(target, **{key: value for key, value in values.items() if not key.startswith("rope_")})
    made = configure(target, models.head)
    assert made.parallel_config.worker_cls == unsupported.ENGINE_WORKERS["cpu"]
