"""The faults of stock SGLang that docs/upstream.md describes, each shown by requests to a server.

Run by tests/support/upstream.py, which leaves the plugin out. Every function gets an empty folder for its models and
logs, and returns whether the fault is there.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bigram_models
import httpx
import mtp_models
import stop_requests
import tiny_models
import tiny_targets
import torch
from safetensors.torch import load_file, save_file
from serving import generate_all, serving, tiny_spec
from tiny_adapters import write_adapter
from tiny_checkpoints import read_config
from transformers import AutoModelForCausalLM
from upstream_run import Reproduction, run, say

from eagle_plugin.bench.servers import Server, ServerError
from eagle_plugin.common.command_end import sigterm_as_exit
from eagle_plugin.sglang.version import installed

PROMPTS = ["tree root leaf", "the quick brown fox", "tree", "one two three four", "x = y", "hello", "write", "10 20 30"]
SYNCHRONOUS = "--disable-overlap-schedule"
STOPS_SECONDS = 60  # within which a server that a request has broken ends


@contextlib.contextmanager
def stock(folder: Path, target: Path, head: Path | None = None, *flags: str, **more: Any) -> Iterator[Server]:
    """SGLang's own server: plain, or with its own worker for drafts."""
    settings: dict[str, Any] = {"extra_flags": ("--skip-server-warmup", *flags), "name": str(len(flags)), **more}
    with serving([tiny_spec(target, head, mode="builtin" if head else "plain", **settings)], folder) as (server,):
        yield server


def last(text: str, part: str) -> str:
    """The last line of a log that has this part, without what SGLang prints before it."""
    return next((line.strip() for line in reversed(text.splitlines()) if part in line), "")


def ended(server: Server) -> bool:
    """Whether the server's process ends by itself, soon."""
    until = time.monotonic() + STOPS_SECONDS
    while time.monotonic() < until:
        try:
            server.check_alive()
        except ServerError:
            return True
        time.sleep(0.5)
    return False


def token_id(folder: Path) -> bool:
    """A prompt of token ids, one of which is as large as the vocabulary."""
    target = tiny_models.tiny_llama(folder / "target")
    vocab = 512
    with stock(folder, target) as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:

        def complete(prompt: list[int]) -> str:
            request = {"model": "default", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            try:
                return f"HTTP {client.post('/v1/completions', json=request).status_code}"
            except httpx.HTTPError as error:
                return f"{type(error).__name__}: {error}"

        say(f"a vocabulary of {vocab}; prompt [5, {vocab - 1}]", complete([5, vocab - 1]))
        say(f"prompt [5, {vocab}]", complete([5, vocab]))
        gone = ended(server)
        say("the server ends", "yes" if gone else "no")
        reason = last(server.log_text(), "IndexError")
        say("its log", reason or "no IndexError")
    return gone and bool(reason)


def weight_update(folder: Path) -> bool:
    """The target's own weights once more, on a server without a draft head and on one with it."""
    target = bigram_models.bigram_target(folder / "target")
    head = bigram_models.bigram_eagle3_head(folder / "head", target)

    def update(server: Server) -> str:
        body = {"model_path": str(target)}
        try:
            return str(httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60, trust_env=False))
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"

    with stock(folder, target) as server:
        say("/update_weights_from_disk without drafts", update(server))
    with stock(folder, target, head, SYNCHRONOUS) as server:
        say("/update_weights_from_disk with a draft head", update(server))
        gone = ended(server)
        say("the server ends", "yes" if gone else "no")
        say("its log", last(server.log_text(), "Error"))
    return gone


def silent_target(folder: Path) -> Path:
    """A target all of whose logits are 0, so that biases and penalties alone choose the tokens."""
    target = tiny_models.tiny_llama(folder)
    path = target / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])}, path, {"format": "pt"})
    return target


def penalties_late(folder: Path) -> bool:
    """Biases of 5 and 4, a frequency penalty of 1.5: each count moves a token below the other, so they take turns."""
    target, (a, b), wanted = silent_target(folder / "target"), (300, 301), 6
    asked = {
        "temperature": 0,
        "max_new_tokens": wanted,
        "ignore_eos": True,
        "frequency_penalty": 1.5,
        "logit_bias": {str(a): 5.0, str(b): 4.0},
    }
    exact = "a b a b a b"
    say("by the definition of the penalty", exact)
    found = {}
    for flags in ((), (SYNCHRONOUS,)):
        with stock(folder, target, None, *flags) as server:
            for end, what in ((41, "another token"), (a, "a")):
                request = {"input_ids": [40, end], "sampling_params": asked}
                answer = httpx.post(f"{server.url}/generate", json=request, timeout=60, trust_env=False).json()
                text = " ".join({a: "a", b: "b"}.get(token, "?") for token in answer["output_ids"])
                found[flags, end] = text
                say(f"{flags[0] if flags else 'overlap'}, prompt ends with {what}", text)
    late = [text for (flags, _), text in found.items() if not flags]
    return exact not in late and all(text == exact for (flags, _), text in found.items() if flags)


def penalties_drafts(folder: Path) -> bool:
    """Greedy answers with a penalty: those of drafts must be those of plain decoding that counts every token."""
    target = bigram_models.bigram_target(folder / "target")
    head = bigram_models.bigram_eagle3_head(folder / "head", target)
    penalty, length = {"frequency_penalty": 1.0}, 24
    with stock(folder, target, None, SYNCHRONOUS) as server:
        free = [a["output_ids"] for a in generate_all(server, PROMPTS, length, 1)]
        plain = [a["output_ids"] for a in generate_all(server, PROMPTS, length, 1, **penalty)]
    with stock(folder, target, head) as server:
        drafted_free = [a["output_ids"] for a in generate_all(server, PROMPTS, length, 1)]
        drafted = [a["output_ids"] for a in generate_all(server, PROMPTS, length, 1, **penalty)]

    def equal(one: list[list[int]], other: list[list[int]]) -> str:
        return f"{sum(a == b for a, b in zip(one, other, strict=True))} of {len(one)} answers"

    say("without a penalty, as plain decoding", equal(drafted_free, free))
    say("the penalty changes plain decoding's text in", f"{sum(a != b for a, b in zip(free, plain, strict=True))}")
    say("with it, as plain decoding without overlap", equal(drafted, plain))
    return drafted_free == free and drafted != plain


def greedy_cpu(folder: Path) -> bool:
    """24 answers to one prompt at temperature 1; the first token of each comes from the prefill, which does sample."""
    target = bigram_models.bigram_target(folder / "target")
    head = bigram_models.bigram_eagle3_head(folder / "head", target)
    found = {}
    for name, drafts in (("plain", None), ("drafts", head)):
        with stock(folder, target, drafts) as server:
            answers = generate_all(server, ["tree"] * 24, 12, 8, temperature=1.0)
        distinct = {tuple(answer["output_ids"]) for answer in answers}
        found[name] = len(distinct), len({answer[0] for answer in distinct})
        say(f"{name}, 24 answers at temperature 1", f"{found[name][0]} different, {found[name][1]} first tokens")
    (free, first), (drafted, drafted_first) = found.values()
    return free > first and drafted == drafted_first


def context_end(folder: Path) -> bool:
    """One request without a limit of its tokens, with the shape of the trees that SGLang chooses for Llama."""
    target = bigram_models.bigram_target(folder / "target")
    head = bigram_models.bigram_eagle3_head(folder / "head", target)
    with stock(folder, target, head, context_length=256, shape=(5, 4, 8)) as server:
        request = {"text": "tree", "sampling_params": {"temperature": 0, "max_new_tokens": None, "ignore_eos": True}}
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(f"{server.url}/generate", json=request, timeout=STOPS_SECONDS, trust_env=False)
            say("the answer", answer.text[:100])
        gone = ended(server)
        say("the server ends of the request", "yes" if gone else "no")
        reason = last(server.log_text(), "Error: ")
    say("its log", reason)
    return gone and "row" in reason


def stops_drafts(folder: Path) -> bool:
    """Stops that end a text inside of a round, under a head that is always right."""
    models = stop_requests.write_models(folder)
    settings = stop_requests.stop_settings(models.ids, models.pieces)
    body = {"text": [stop_requests.PROMPT] * len(settings), "sampling_params": settings}
    chain = (stop_requests.RUN - 1, 1, stop_requests.RUN)
    found = {}
    for name, drafts in (("plain", None), ("drafts", models.head)):
        with stock(folder, models.target, drafts, shape=chain) as server:
            answers = httpx.post(f"{server.url}/generate", json=body, timeout=120, trust_env=False).json()
        found[name] = [(answer["text"], answer["meta_info"]["finish_reason"]) for answer in answers]
    differ = [i for i, (one, other) in enumerate(zip(*found.values(), strict=True)) if one != other]
    say("answers that do not end as plain decoding's", f"{len(differ)} of {len(settings)}")
    for i in differ[:1]:
        say("the first: stops", settings[i]["stop"])
        for name, endings in found.items():
            say(name, f"{endings[i][0]!r}, {endings[i][1]}")
    return bool(differ)


def logit_processor(folder: Path) -> bool:
    """A processor of SGLang's own that forbids every other token of the greedy answer."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    target = bigram_models.bigram_target(folder / "target")
    head = bigram_models.bigram_eagle3_head(folder / "head", target)
    broken, forbidden = {}, list[int]()
    for name, drafts in (("plain", None), ("drafts", head)):
        with stock(folder, target, drafts, "--enable-custom-logit-processor") as server:
            if not forbidden:
                forbidden = sorted(set(generate_all(server, ["tree"], 24, 1)[0]["output_ids"]))[::2]
            request = {
                "text": "tree",
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": 24,
                    "ignore_eos": True,
                    "custom_params": {"token_ids": forbidden},
                },
                "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
            }
            answer = httpx.post(f"{server.url}/generate", json=request, timeout=60, trust_env=False).json()[
                "output_ids"
            ]
        broken[name] = sum(token in forbidden for token in answer)
        say(f"{name}: forbidden tokens among {len(answer)}", broken[name])
    return broken["plain"] == 0 < broken["drafts"]


def lora_pinning(folder: Path) -> bool:
    """A server with one adapter, and a request to it."""
    target = tiny_models.tiny_llama(folder / "target")
    adapter = write_adapter(folder / "adapter", target)
    flags = ("--enable-lora", "--lora-backend", "torch_native", "--lora-paths", f"twist={adapter}")
    without_repairs = {"SGLANG_PLUGINS": "none"}
    return crashes(folder, target, *flags, part="pin_memory=True requires", environment=without_repairs)


def llama4_cpu(folder: Path) -> bool:
    """A tiny random Llama 4, in both data types: the cast ends it in float32, the experts in bfloat16."""
    target = tiny_targets.write_target(folder / "target", "llama4_text", head_dim=32, max_position_embeddings=512)
    flag = "--skip-tokenizer-init"
    settings = {"context_length": 256, "environment": {"SGLANG_PLUGINS": "none"}}  # without the repairs of ours
    cast = crashes(folder, target, flag, part="same dtype, but got", dtype="float32", **settings)
    experts = crashes(folder, target, flag, part="in moe_forward_native", dtype="bfloat16", **settings)
    return cast and experts


def llama4_text(folder: Path) -> bool:
    """The greedy text of a tiny Llama 4 under both of its classes, beside that of transformers."""
    target = tiny_targets.write_target(folder / "target", "llama4_text", head_dim=32, max_position_embeddings=512)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompt, tokens = [5, 6, 7, 8, 9, 10], 16
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    wanted = generated[0, len(prompt) :].tolist()
    say("transformers", wanted)
    equal = {}
    for name in ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"):
        (target / "config.json").write_text(json.dumps(read_config(target) | {"architectures": [name]}))
        with stock(folder / name, target, None, "--skip-tokenizer-init", context_length=256) as server:
            sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
            request = {"input_ids": prompt, "sampling_params": sampling}
            answer = httpx.post(f"{server.url}/generate", json=request, timeout=60, trust_env=False).json()
            say(name, answer["output_ids"])
            say("its log", last(server.log_text(), "not found in params_dict") or "no parameter that was not found")
            equal[name] = answer["output_ids"] == wanted
    return list(equal.values()) == [False, True]


def crashes(folder: Path, target: Path, *flags: str, part: str, **settings: Any) -> bool:
    """Whether a server ends, at its start or of its first request, with an error of which the log has this part."""
    label = settings.get("dtype", "float32")
    log = folder / label
    try:
        with stock(log, target, None, *flags, **settings) as server:
            say(f"{label}: the server starts", "yes")
            request = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/generate", json=request, timeout=STOPS_SECONDS, trust_env=False)
            gone = ended(server)
            say(f"{label}: it ends of the first request", "yes" if gone else "no")
    except ServerError:
        gone = True
        say(f"{label}: the server starts", "no")
    text = "\n".join(path.read_text(errors="replace") for path in log.rglob("*.log"))
    reason = last(text, part)
    say(f"{label}: its log", reason or f"nothing with {part!r}, but: {last(text, 'Error')}")
    return gone and bool(reason)


def mtp_cpu(folder: Path) -> bool:
    """The same small target with and without drafts by its MTP layer."""
    target = mtp_models.mtp_target(folder / "target", "qwen3_moe")
    with stock(folder, target):
        say("without drafts: the server starts", "yes")
    drafts = ("--speculative-algorithm", "NEXTN")
    return crashes(folder, target, *drafts, part="Torch not compiled with CUDA enabled")


REPRODUCTIONS: dict[str, Reproduction] = {
    "sglang-token-id": token_id,
    "sglang-weight-update": weight_update,
    "sglang-penalties-late": penalties_late,
    "sglang-penalties-drafts": penalties_drafts,
    "sglang-greedy-cpu": greedy_cpu,
    "sglang-context-end": context_end,
    "sglang-stops-drafts": stops_drafts,
    "sglang-logit-processor": logit_processor,
    "sglang-lora-pinning": lora_pinning,
    "sglang-mtp-cpu": mtp_cpu,
    "sglang-llama4-cpu": llama4_cpu,
    "sglang-llama4-text": llama4_text,
}

if __name__ == "__main__":
    with sigterm_as_exit():  # stops the server
        sys.exit(run(REPRODUCTIONS, f"stock SGLang {installed()}"))
