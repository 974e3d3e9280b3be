"""Connectors of KV caches: what one server read of a prompt, another drafts and verifies on.

`ExampleConnector` keeps blocks in files, so that a test sees them. NIXL, with which prompts are read by one server and
answers are decoded by another in production, runs over the memory of this machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import serving, vllm_spec
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm_engines import AlwaysPlain, accept_length, chosen_by, engine, generate, rounds, runner
from vllm_greedy import make_prompts, write_blurred_head, write_target

from eagle_plugin.bench.servers import Server, free_port
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.vllm.kv_connectors import SERVED, unserved_connectors

PROMPTS = [prompt for prompt in make_prompts(12, longest=150) if len(prompt) > 40]
LENGTH = 40
# ExampleConnector keeps what one step reads of a prompt: no prompt may be read in parts.
TREES: dict[str, Any] = {"depth": 3, "topk": 4, "nodes": 16, "max_num_batched_tokens": 2048}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder)
    return target, write_blurred_head(folder, target)


def kept_in(folder: Path, role: str) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role=role,
        kv_connector_extra_config=extra,  # type: ignore[arg-type]
    )
    return {"kv_transfer_config": config}


def head_files(folder: Path, llm: LLM) -> list[Path]:
    """What an engine has kept of the head's own layer."""
    (layer,) = runner(llm).drafter._draft_attn_layer_names
    return sorted(folder.rglob(f"{layer}.safetensors"))


def test_the_head_drafts_on_what_another_engine_read(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Also where the other engine decodes plainly, whose head may else read a prompt later."""
    target, head = models
    with engine(target, max_num_batched_tokens=2048) as llm:
        plain = generate(llm, PROMPTS, max_tokens=LENGTH)
    with engine(target, head, **TREES, **kept_in(tmp_path, "kv_producer")) as llm:
        with chosen_by(llm, AlwaysPlain(runner(llm)._caps, None)):
            assert generate(llm, PROMPTS, max_tokens=1) == [answer[:1] for answer in plain]
        files = head_files(tmp_path, llm)
        assert len(files) == len(PROMPTS)
    with engine(target, head, **TREES, **kept_in(tmp_path, "kv_consumer")) as llm:
        assert generate(llm, PROMPTS, max_tokens=LENGTH) == plain
        informed = accept_length(llm)
        for file in files:  # control: a head that has read nothing of the prompts drafts worse, and the text stays
            save_file({name: torch.zeros_like(kept) for name, kept in load_file(file).items()}, file)
        before = rounds(llm)
        assert generate(llm, PROMPTS, max_tokens=LENGTH) == plain
        count, tokens = rounds(llm, before)
        assert tokens / count < informed


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"kv_connector": "NixlConnector"}, None),
        ({"kv_connector": "LMCacheConnectorV1"}, "LMCacheConnectorV1 has not been tried"),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": "another"}, "NixlConnector has not been tried"),
        ({"kv_connector": "OffloadingConnector", "enable_permute_local_kv": True}, "enable_permute_local_kv has not"),
    ],
)
def test_connectors_that_nobody_tried_are_named(config: dict[str, Any], named: str | None) -> None:
    reasons = unserved_connectors(KVTransferConfig(kv_role="kv_both", **config))
    assert [named in reason for reason in reasons] == ([True] if named else [])


def test_connectors_inside_of_another_are_looked_at() -> None:
    def reasons(*names: str) -> list[str]:
        extra = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in names]}
        config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        return unserved_connectors(config)

    assert reasons(*SERVED) == [] and unserved_connectors(None) == []
    (reason,) = reasons("NixlConnector", "MooncakeConnector")
    assert "MooncakeConnector has not been tried" in reason


# ---------------------------------------------------------------------------------------------------------------------
# NIXL: a server that reads prompts and one that decodes


@contextmanager
def connected(specs: list[ServerSpec], folder: Path) -> Iterator[list[Server]]:
    """Servers that copy blocks among each other; each has a port of its own for what it tells the others."""
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    shared = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "UCX_TLS": "tcp,self,shm",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else both have the same core
        "OMP_WAIT_POLICY": "PASSIVE",
        "EAGLE_POLICY": "fixed",
        "VLLM_LOGGING_LEVEL": "INFO",  # the plugin says who serves
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    flags = ("--kv-transfer-config", json.dumps(given))
    specs = [
        replace(
            spec,
            extra_flags=(*spec.extra_flags, *flags),
            environment=shared | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            python=Path(sys.executable),
            name=str(number),
        )
        for number, spec in enumerate(specs)
    ]
    with serving(specs, folder) as servers:
        yield servers


def complete(server: Server, prompt: list[int], tokens: int, **transfer: Any) -> dict[str, Any]:
    """The answer to a request; transfer: what is told the connector."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    models = httpx.get(f"{server.url}/v1/models", trust_env=False).json()
    asked |= {"model": models["data"][0]["id"]} | ({"kv_transfer_params": transfer} if transfer else {})
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120, trust_env=False)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def answer_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def decode_elsewhere(reads: Server, decodes: Server, prompt: list[int]) -> dict[str, Any]:
    """An answer of one server to a prompt that the other has read."""
    remote = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    first = complete(reads, prompt, 1, do_remote_decode=True, do_remote_prefill=False, **remote)
    return complete(decodes, prompt, LENGTH, **first["kv_transfer_params"])


def counted(server: Server, name: str) -> float:
    page = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"vllm:{name}_total"))


def wait_for(server: Server, line: str, seconds: float = 30) -> None:
    """Its processes write their lines at times of their own."""
    until = time.monotonic() + seconds
    while line not in server.log_text():
        assert time.monotonic() < until, server.log_text()[-4000:]
        time.sleep(0.2)


@pytest.mark.matrix
@pytest.mark.server
@pytest.mark.parametrize("sizes", [(32, 32), (32, 64)], ids=str)
def test_prompts_are_read_by_another_server(models: tuple[Path, Path], sizes: tuple[int, int], tmp_path: Path) -> None:
    """Text and drafts are those of a server that reads its prompts itself, whose blocks may have another size."""
    specs = [vllm_spec(*models, (3, 4, 16), extra_flags=("--block-size", str(size))) for size in sizes]
    with connected(specs, tmp_path) as (reads, decodes):
        prompts = PROMPTS[:6]
        found = [answer_of(decode_elsewhere(reads, decodes, prompt)) for prompt in prompts]
        assert counted(decodes, "external_prefix_cache_hits") >= 0.9 * sum(map(len, prompts))
        assert counted(reads, "spec_decode_num_drafts") == 0
        wanted = [answer_of(complete(reads, prompt, LENGTH)) for prompt in prompts]
        assert found == wanted and len(set(map(tuple, found))) > 1
        accepted = [counted(server, "spec_decode_num_accepted_tokens") for server in (reads, decodes)]
        assert accepted[1] >= 0.95 * accepted[0]


@pytest.mark.matrix
@pytest.mark.server
def test_a_server_without_the_plugin_is_refused_as_a_reader(models: tuple[Path, Path], tmp_path: Path) -> None:
    """vLLM's own attention on a CPU has another order of numbers in a block, which would be taken for ours."""
    own = vllm_spec(*models, (15, 1, 16), mode="builtin")
    specs = [replace(spec, extra_flags=("--block-size", "32")) for spec in (own, vllm_spec(*models, (3, 4, 16)))]
    with connected(specs, tmp_path) as (reads, decodes):
        with pytest.raises(httpx.HTTPError):
            decode_elsewhere(reads, decodes, PROMPTS[0])
        wait_for(decodes, "NIXL compatibility hash mismatch")
