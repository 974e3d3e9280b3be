"""In the compile cache of vLLM our graphs have keys of their own, and those of stock vLLM the keys they always had."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.compilation.caching import aot_compile_hash_factors
from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm_compiled import ask_compiled
from vllm_configs import configure

import eagle_plugin
from eagle_plugin.vllm import compile_cache, plugin, support, unsupported
from eagle_plugin.vllm.plugin_config import caps_of, is_served

pytestmark = pytest.mark.usefixtures("lines")


@pytest.fixture
def made(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the configuration of an engine, with the plugin or without."""
    plugin.register()  # vLLM does it with the first configuration, unless the plugin is switched off

    def make(switch: str = "1", **options: Any) -> VllmConfig:
        monkeypatch.setenv("EAGLE_PLUGIN", switch)
        config = configure(target, head, **options)
        assert is_served(config.speculative_config) is (switch == "1")
        return config

    return make


def keys(config: VllmConfig) -> tuple[str, list[str]]:
    """Of both caches: of torch.compile, and of compilation ahead of time."""
    return config.compute_hash(), aot_compile_hash_factors(config)


def test_our_graphs_have_keys_of_their_own(made: Any) -> None:
    ours, stock = made(), made("0")
    assert all(one != other for one, other in zip(keys(ours), keys(stock), strict=True))
    assert keys(ours) == keys(made()) and keys(stock) == keys(made("0"))  # or nothing would ever be found again
    assert stock.additional_config == {}


def test_a_configuration_that_is_left_to_vllm_has_its_key(
    made: Any, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {"kv_cache_dtype": "fp8_per_token_head"}
    stock = made("0", **left)
    monkeypatch.setenv("EAGLE_PLUGIN", "1")
    config = configure(target, head, **left)
    assert not is_served(config.speculative_config) and keys(config) == keys(stock)


def test_the_key_knows_what_the_graphs_depend_on(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"eagle_plugin": {"depth": 2, "topk": 3}}
    found = {
        "defaults": made(),
        "caps, by the flag of vLLM": made(speculative={"num_speculative_tokens": 5}),
        "caps, by an option": made(additional_config=given),
    }
    for name in ("EAGLE_DRAFT_INT8", "EAGLE_TARGET_LINEAR"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            found[name] = made()
    for owner, name, value in (
        (eagle_plugin, "__version__", "9.9"),
        (compile_cache, "sources_digest", lambda kind: "other sources"),
        (compile_cache, "device_key", lambda device: {"device": "another CPU"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found[name] = made()
    hashes = {name: config.compute_hash() for name, config in found.items()}
    assert len(set(hashes.values())) == len(hashes), hashes


def test_the_mark_travels_and_is_completed_once(made: Any) -> None:
    """To the processes of the workers, and into the configuration that vLLM derives for the head."""
    config = made(additional_config={"eagle_plugin": {"depth": 2}, "of others": [1]})
    key = config.compute_hash()
    assert pickle.loads(pickle.dumps(config)).compute_hash() == key
    assert replace(config, quant_config=None).compute_hash() == key
    support.choose_worker(config)  # vLLM completes it again
    assert config.compute_hash() == key
    assert config.additional_config["of others"] == [1] and json.dumps(config.additional_config)


def test_the_mark_of_a_gpu_needs_no_device(made: Any) -> None:
    """The launcher must not use CUDA."""
    config = made()
    object.__setattr__(config.device_config, "device_type", "cuda")
    before = config.compute_hash()
    compile_cache.set_compile_key(config, caps_of(config.speculative_config))
    assert config.compute_hash() != before and "cpu" not in config.additional_config[compile_cache.KEY]


def test_a_configuration_object_of_others_is_left_to_vllm(made: Any, lines: list[str]) -> None:
    class Others:
        def compute_hash(self) -> str:
            return "theirs"

    config = made("0", additional_config={})
    config.additional_config = Others()
    (reason,) = unsupported.unsupported_reasons(config)
    assert reason == "additional_config: it is Others, only a dictionary is served"


@pytest.mark.matrix  # the keys are compared above; each engine compiles for a minute or more
@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["plugin first", "stock first"])
def test_engines_that_share_a_cache_say_the_same(
    order: tuple[bool, bool], target: Path, head: Path, tmp_path: Path
) -> None:
    """And neither loads what the other has saved. That they would with one key is not shown here: that needs a device
    on which vLLM loads compiled models at all, which it did not in trials on a CPU."""
    first, second = (ask_compiled(target, head, tmp_path, plugin) for plugin in order)
    assert first.answers == second.answers
    assert (first.loaded, second.loaded) == (0, 0) and first.saved == second.saved > 0
