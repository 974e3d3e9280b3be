"""The faults of stock vLLM that docs/upstream.md describes, each shown by requests to an engine in this process.

Run by tests/support/upstream.py, which switches the plugin off. Every function gets an empty folder for its models and
returns whether the fault is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bigram_models import VOCAB, spoken
from family_models import CHANGES, family_head, family_target
from tiny_adapters import write_adapter
from tiny_checkpoints import read_config, write_config
from upstream_block_drafters import context_norms
from upstream_run import Reproduction, run, say
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm_bigram import PROMPTS, ask, tokens, write_models, write_peagle
from vllm_engines import engine, generate, runner
from vllm_greedy import make_prompts, write_target

from eagle_plugin.vllm.version import installed

DRAFTED = {"nodes": 5}  # a chain of four drafted tokens


@contextmanager
def stock(target: Path, head: Path | None = None, **options: Any) -> Iterator[LLM]:
    """vLLM's own engine: plain, or with its own chain of drafts."""
    with engine(target, head, chain=True, **DRAFTED, **options) as llm:
        yield llm


def sampler(folder: Path) -> bool:
    """At temperature 0.01 plain decoding gives the greedy text, and drafts must too."""
    target, head = write_models(folder)
    cold = [{"temperature": 0.01}] * len(PROMPTS)
    with stock(target) as llm:
        greedy, plain = tokens(ask(llm, PROMPTS, [{}] * len(PROMPTS))), tokens(ask(llm, PROMPTS, cold))
    with stock(target, head) as llm:
        drafted, at_zero = tokens(ask(llm, PROMPTS, cold)), tokens(ask(llm, PROMPTS, [{}] * len(PROMPTS)))
    for what, found in (
        ("plain, temperature 0.01: greedy text in", plain),
        ("with drafts, temperature 0: greedy text in", at_zero),
        ("with drafts, temperature 0.01: greedy text in", drafted),
    ):
        say(what, f"{sum(a == b for a, b in zip(found, greedy, strict=True))} of {len(greedy)} answers")
    return plain == greedy == at_zero and drafted != greedy


def seed_chunks(folder: Path) -> bool:
    """A seed, and a prompt of more tokens than one step reads; the same prompt without a seed is served."""
    target, _ = write_models(folder)
    prompt, setting = " ".join(PROMPTS * 2), {"temperature": 1.0, "max_tokens": 4}
    with stock(target, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        answer = ask(llm, [prompt], [setting])[0]
        say("tokens of the prompt; a step reads at most", f"{len(answer.prompt_token_ids)}; 64")
        say("without a seed", f"{len(answer.outputs[0].token_ids)} tokens")
        errors = []
        for what, seed in (("with seed=1", {"seed": 1}), ("without a seed, after it", {})):
            try:
                ask(llm, [prompt], [setting | seed])
                say(what, "served")
            except RuntimeError as error:
                errors.append(str(error))
                say(what, f"RuntimeError: {error}")
    return any("offset" in error for error in errors)


def min_tokens(folder: Path) -> bool:
    """Stop tokens must not come before min_tokens: looks for them at the front of greedy answers.

    On a CPU vLLM switches asynchronous scheduling off after it has read its flags; it is switched on again here, which
    is what a GPU has by default.
    """
    target, head = write_models(folder)
    complete = CpuPlatform.check_and_update_config

    def complete_asynchronously(config: Any) -> None:
        complete(config)
        config.scheduler_config.async_scheduling = True

    wanted, found = 12, {}
    stops = spoken(target)[::2]
    setting = {"min_tokens": wanted, "stop_token_ids": stops, "max_tokens": 24}
    for asynchronous in (False, True):
        if asynchronous:
            CpuPlatform.check_and_update_config = staticmethod(complete_asynchronously)
        with stock(target, head) as llm:
            assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == asynchronous
            answers = tokens(ask(llm, PROMPTS, [setting] * len(PROMPTS)))
        early = [sum(token in stops for token in answer[:wanted]) for answer in answers]
        found[asynchronous] = sum(early)
        kind = "asynchronous" if asynchronous else "synchronous"
        say(f"{kind}: stop tokens in the first {wanted}", f"{early} in {len(answers)} answers")
    return found[True] > found[False] == 0


def thinking_budget(folder: Path) -> bool:
    """Of two requests the first has a budget and ends early, and the second, which has none, takes its place."""
    start, end = "`!", "so."
    target, _ = write_models(folder)
    config = {"reasoning_config": {"reasoning_start_str": start, "reasoning_end_str": end}}
    prompt = start + PROMPTS[0]
    with stock(target, **config) as llm:
        alone = tokens(ask(llm, [prompt], [{}]))[0]
        beside = tokens(ask(llm, [prompt] * 2, [{"thinking_token_budget": 30, "max_tokens": 4}, {}]))[1]
        ids = llm.get_tokenizer().encode(end, add_special_tokens=False)

    def ended(text: list[int]) -> int | None:
        """Where the thinking was ended."""
        return next((i for i in range(len(text)) if text[i : i + len(ids)] == ids), None)

    say("no budget, alone: thinking is ended at token", ended(alone))
    say("no budget, beside one with 30: at token", ended(beside))
    return ended(alone) is None and ended(beside) is not None


def lora_mixed(folder: Path) -> bool:
    """Requests without an adapter, alone and in one batch with requests that have one."""
    target = write_target(folder)
    adapter = LoRARequest("twist", 1, str(write_adapter(folder / "adapter", target)))
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(8)]
    with stock(target, enable_lora=True, max_lora_rank=8, max_loras=1, max_num_seqs=16) as llm:

        def answer(asked: list[Any], adapters: list[LoRARequest | None]) -> list[list[int]]:
            settings = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
            return tokens(llm.generate(asked, settings, lora_request=adapters, use_tqdm=False))

        alone, adapted = (answer(prompts, [one] * len(prompts)) for one in (None, adapter))
        doubled = answer(prompts * 2, [None] * 2 * len(prompts))[: len(prompts)]
        mixed = answer(prompts * 2, [None] * len(prompts) + [adapter] * len(prompts))[: len(prompts)]
    say("with the adapter: another text in", f"{sum(a != b for a, b in zip(adapted, alone, strict=True))} of 8 answers")
    say("without it, in a larger batch without it", "the same text" if doubled == alone else "another text")
    changed = sum(a != b for a, b in zip(mixed, alone, strict=True))
    say("without it, in a batch with it: another text in", f"{changed} of 8 answers")
    return doubled == alone and changed > 0


def chunk_ends(folder: Path) -> bool:
    """What the head reads beside the last features of each part of a prompt: the next token of the prompt is right."""
    target, eagle3 = write_models(folder)
    peagle = write_peagle(folder)[1]
    prompt = [3 + 7 * i % (VOCAB - 3) for i in range(70)]
    wrong = {}
    for what, head, options in (
        ("EAGLE-3", eagle3, {}),
        ("P-EAGLE, parallel_drafting", peagle, {"parallel_drafting": True}),
        ("EAGLE-3, disable_padded_drafter_batch", eagle3, {"disable_padded_drafter_batch": True}),
    ):
        speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4} | options
        with stock(target, head, speculative_config=speculative, max_num_batched_tokens=24, max_num_seqs=2) as llm:
            drafter, read = runner(llm).drafter, []
            original = drafter.set_inputs_first_pass

            def kept(read: list[tuple[int, int]] = read, original: Any = original, **inputs: Any) -> Any:
                read.append((int(inputs["target_positions"].max()), int(inputs["next_token_ids"][0])))
                return original(**inputs)

            drafter.set_inputs_first_pass = kept
            generate(llm, [prompt], max_tokens=1)
        ends = [(end, token) for end, token in read if end + 1 < len(prompt)]
        found = [token for _, token in ends]
        say(f"{what}: parts end at", [end for end, _ in ends])
        say("  the prompt goes on with", [prompt[end + 1] for end, _ in ends])
        say("  the head reads", f"{found}; the prompt's last token is {prompt[-1]}")
        wrong[what] = found == [prompt[-1]] * len(ends) and len(ends) > 1
        right = found == [prompt[end + 1] for end, _ in ends]
    return list(wrong.values()) == [True, True, False] and right


def states_cache(folder: Path) -> bool:
    """Qwen3-Next with vLLM's own chain of drafts, with prefix caching and without; its kernels want wide heads."""
    CHANGES["qwen3_next"] |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    target = family_target(folder / "target", "qwen3_next")
    head = family_head(folder / "head", target, "eagle3")
    found = {}
    for cached in (False, True):
        options = {"dtype": "bfloat16", "enable_prefix_caching": cached, "gpu_memory_utilization": 0.3}
        try:
            with stock(target, head, **options) as llm:
                found[cached] = f"{len(generate(llm, [[5, 6, 7]], max_tokens=8)[0])} tokens"
        except Exception as error:
            found[cached] = f"{type(error).__name__}: {error}"
        say("with prefix caching" if cached else "without prefix caching", found[cached])
    return found[False] == "8 tokens" and "not subscriptable" in found[True]


class StoringImpl(CPUAttentionBackendImpl):
    """vLLM's attention on a CPU, which stores keys and values as a part of itself."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, **options: Any
    ) -> Any:
        if metadata is not None:
            *_, slots = attention.get_attention_context(layer.layer_name)
            self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        return super().forward(layer, query, key, value, kv_cache, metadata, **options)


class StoringBackend(CPUAttentionBackend):
    """The same as a backend that says so, which leaves an operation out of the graphs."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[StoringImpl]:
        return StoringImpl


def compile_cache(folder: Path) -> bool:
    """Two graphs, one key: the operation that stores keys is called with vLLM's backend and not with another, which is
    registered in its place; neither that nor another class of worker changes the key of the compile cache."""
    target, _ = write_models(folder)
    stores, keys, responses = [], [], []
    original = torch.ops.vllm.unified_kv_cache_update

    def counted(*arguments: Any) -> Any:
        stores[-1] += 1
        return original(*arguments)

    torch.ops.vllm.unified_kv_cache_update = counted
    backend, own = AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CPU_ATTN.get_path()
    for path in (own, f"{StoringBackend.__module__}.{StoringBackend.__qualname__}"):
        register_backend(backend, path)
        selector._cached_get_attn_backend.cache_clear()
        stores.append(0)
        with stock(target) as llm:
            responses.append(generate(llm, [[5, 6, 7], [9, 4]], max_tokens=16))
            keys.append(runner(llm).vllm_config.compute_hash())
            runner(llm).vllm_config.parallel_config.worker_cls = "another.Worker"
            keys.append(runner(llm).vllm_config.compute_hash())
    say("calls of the operation that stores keys", f"{stores[0]}; with the other backend {stores[1]}")
    say("the answers are the same", responses[0] == responses[1])
    say("keys of the compile cache", ", ".join(keys))
    return stores[0] > 0 == stores[1] and responses[0] == responses[1] and len(set(keys)) == 1


def latent_rotation(folder: Path) -> bool:
    """Each prompt alone and all together, without YaRN and with it, and without it by vLLM's own code in torch."""
    alike = {}
    for what in ("with YaRN", "without", "without, in torch"):
        target = family_target(folder / what, "deepseek_v3")
        if what != "with YaRN":
            values = read_config(target)
            kept = {key: value for key, value in values.items() if key not in ("rope_parameters", "rope_scaling")}
            write_config(target, **kept, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        if what.endswith("torch"):
            RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
        prompts = make_prompts(8)
        with stock(target) as llm:
            together, alone = generate(llm, prompts), [generate(llm, [prompt])[0] for prompt in prompts]
        alike[what] = sum(a == b for a, b in zip(together, alone, strict=True))
        say(f"{what}: the same text alone and in a batch", f"{alike[what]} of {len(prompts)} prompts")
    return alike["without"] < 8 == alike["with YaRN"] == alike["without, in torch"]


def latent_blocks(folder: Path) -> bool:
    """DeepSeek-V3 plain, and with vLLM's own chain of drafts by an ordinary head."""
    target = family_target(folder / "target", "deepseek_v3")
    head = family_head(folder / "head", target, "eagle3")
    found = []
    for of in (None, head):
        try:
            with stock(target, of) as llm:
                found.append(f"{len(generate(llm, [[5, 6, 7]], max_tokens=8)[0])} tokens")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        say("plain" if of is None else "with a head", found[-1])
    return found[0] == "8 tokens" and "No common block size" in found[1]


REPRODUCTIONS: dict[str, Reproduction] = {
    "vllm-sampler": sampler,
    "vllm-seed-chunks": seed_chunks,
    "vllm-min-tokens": min_tokens,
    "vllm-thinking-budget": thinking_budget,
    "vllm-lora-mixed": lora_mixed,
    "vllm-chunk-ends": chunk_ends,
    "vllm-states-cache": states_cache,
    "vllm-compile-cache": compile_cache,
    "vllm-latent-rotation": latent_rotation,
    "vllm-latent-blocks": latent_blocks,
    "vllm-context-norms": context_norms,
}

if __name__ == "__main__":
    sys.exit(run(REPRODUCTIONS, f"stock vLLM {installed()}"))
