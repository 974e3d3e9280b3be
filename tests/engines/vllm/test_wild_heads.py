"""vLLM alone loads each layout of a public head exactly where the plugin's rules say that it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import latent_kernels
from vllm_models import Served, make_config
from wild_heads import ACCEPTED, write
from wild_layouts import LAYOUTS

from eagle_plugin.heads.description import read_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.vllm_classes import EAGLE, EAGLE3, MISTRAL, QWEN3, SERVED, class_config, class_name

# What vLLM loads and the plugin does not, with the reason.
LOADED = {
    "AngelSlim, the target's number of layers": "vLLM leaves six of the seven layers at random values",
    "two names for one parameter": "vLLM keeps the one that it reads last",
    "ModelOpt, Kimi K2": "the class is another one",
}


@pytest.mark.matrix  # two seconds each: `tests/heads/test_wild_heads.py` has the same decisions without vLLM
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_vllm_loads(name: str, tiny_target: Path, tmp_path: Path) -> None:
    folder = write(LAYOUTS[name], tmp_path / "head", tiny_target)
    try:
        spec = read_head(folder).spec
    except HeadError:
        spec = None
    method, parallel = (spec.method, spec.levels.depth_is_free) if spec else ("eagle3", False)
    try:
        with latent_kernels(folder):  # those by AMX take no layers as small as these
            served = Served(make_config(tiny_target, folder, method, parallel=parallel))
    except Exception as error:
        assert name not in LOADED and LAYOUTS[name].vllm != ACCEPTED, error
        return
    assert name in LOADED or LAYOUTS[name].vllm == ACCEPTED
    if LAYOUTS[name].vllm == ACCEPTED:
        head = read_head(folder)
        found, wanted = served.drafter.draft_model_config, class_config(head)
        assert found.architecture == class_name(head, method)
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            assert bool(getattr(found.hf_config, key, False)) == bool(wanted.get(key)), key


def test_the_names_of_vllms_classes() -> None:
    from vllm.model_executor.models import registry

    known = {name: place for name, place in registry._SPECULATIVE_DECODING_MODELS.items()}
    assert [known[name] for name in MISTRAL] == [("mistral_eagle", "EagleMistralForCausalLM")]
    assert {known[name] for name in EAGLE} == {("llama_eagle", "EagleLlamaForCausalLM")}
    for module, names in (("llama_eagle3", EAGLE3), ("qwen3_eagle3", QWEN3)):
        assert {name for name, (found, _) in known.items() if found == module} == set(names)
    assert len(set(SERVED)) == len(SERVED)
