"""Pins what SGLang's models, layers, attention and server arguments do where the adapter touches them.

Those of its worker and scheduler are in test_contract.py.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from types import SimpleNamespace

import pytest
from engine_signatures import assignments, calls, holds, in_order

pytest.importorskip("sglang.srt.speculative.eagle_worker_v2", reason="the SGLang environment is not installed")

from sglang.srt.model_executor.model_runner import ModelRunner

from eagle_plugin.sglang import draft_classes, flag_support, kernel_settings


def test_a_forward_over_trees_leaves_out_what_other_models_need():
    """forward.py calls the model itself: what ModelRunner and its runners do around the call is theirs to know of."""
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    overridden = calls(ModelRunner._forward_raw, "override")
    if "shared_experts_config" in inspect.getsource(ModelRunner):  # not in older releases (releases.py)
        assert "get_model().override(shared_experts=self.model.shared_experts_config)" in overridden
    else:
        assert overridden == []
    assert calls(EagerRunner._execute_extend, "model_runner.model.forward") == [
        "model_runner.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch, **kwargs)"
    ]


def test_adapters_are_prepared_as_the_engine_prepares_them():
    """adapters.py: what ForwardBatch.init_new does, with all that LoRAManager reads of the batch of such a forward."""
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.utils import generate_sequence_lengths
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    assert in_order(
        ForwardBatch.init_new,
        [
            "model_runner.lora_manager.fetch_new_loras(set(ret.lora_ids))",
            "model_runner.lora_manager.prepare_lora_batch(ret)",
        ],
    )
    assert assignments(generate_sequence_lengths, "seg_lens")[2].count("forward_batch.spec_info.draft_token_num") == 1
    read = set()
    for method in (LoRAManager.prepare_lora_batch, LoRAManager._use_cuda_graph_batch):
        source = inspect.getsource(method)
        read |= set(re.findall(r"forward_batch\.(\w+)", source))
    # The last one is read under data-parallel attention only, which is left to the engine.
    assert read == {"lora_ids", "forward_mode", "batch_size", "can_run_decode_cuda_graph"}


def test_the_heads_linear_layers_can_be_given_another_method(monkeypatch):
    """draft_weights.py: LinearBase and the output layer call quant_method.apply(layer, x, bias)."""
    import torch
    from sglang.srt.layers import linear
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from eagle_plugin.kernels import int8_linear
    from eagle_plugin.runtime.draft_weights import Int8Method
    from eagle_plugin.sglang import draft_weights

    for layer in (linear.QKVParallelLinear, linear.MergedColumnParallelLinear, linear.RowParallelLinear):
        assert issubclass(layer, linear.LinearBase)
    for layer, given in (
        (linear.RowParallelLinear, "input_parallel, bias=bias_"),
        (linear.ColumnParallelLinear, "input_, bias"),
    ):
        assert f"self.quant_method.apply(self, {given})" in assignments(layer.forward, "output_parallel")
    output_layer = torch.nn.Linear(64, 32, bias=False).bfloat16()
    method = Int8Method(int8_linear.pack(output_layer.weight.data), UnquantizedLinearMethod())
    assert should_apply_lm_head_quant_method(output_layer, method)
    monkeypatch.setattr(int8_linear, "max_rows", lambda: 20)
    few, many = torch.randn(2, 64).bfloat16(), torch.randn(21, 64).bfloat16()
    assert torch.equal(method.apply(output_layer, many), output_layer(many))
    torch.testing.assert_close(method.apply(output_layer, few), output_layer(few), rtol=0.05, atol=0.05)
    head = torch.nn.Sequential(torch.nn.Linear(64, 32).bfloat16(), torch.nn.Linear(64, 32).bfloat16())
    head[0].use_intel_amx_backend = True  # its weights are in the order of AMX's tiles
    assert draft_weights.use_int8_weights(head, torch.nn.Identity()) == 1
    assert list(draft_weights.int8_weights(head)) == ["1"]


def test_a_head_can_be_loaded_again():
    """head_exchange.py: the runner reads the folder from its model_config, and the drafter finds the model there."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    assert "loaded.model" in assignments(ModelRunner.load_model, "self.model")
    (load,) = calls(ModelRunner.load_model, "load_model_with_memory_saver")
    assert "model_config=self.model_config" in load
    assert "self.draft_runner.model.hot_token_id.to(embed.device)" in assignments(
        EagleDraftWorker.init_lm_head, "self.hot_token_id"
    )


def test_a_masked_row_is_fused_as_the_features_of_real_rows_are():
    """eagle3_model.py: the class that we register is found by its name, and fuses what is not as wide as a token."""
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3, LlamaModel
    from sglang.srt.models.registry import ModelRegistry

    assert holds(type(ModelRegistry).resolve_model_cls, "self.models.get(first_arch)")
    # A test before this one in the process may have registered our class in its place.
    assert issubclass(ModelRegistry.models["LlamaForCausalLMEagle3"], LlamaForCausalLMEagle3)
    fusion = ["self.input_norm", "self.fc_norm", "hidden_states.chunk(self.num_aux_hidden_states, dim=-1)", "self.fc"]
    assert in_order(LlamaModel.forward, ["hidden_states.shape[-1] != embeds.shape[-1]", *fusion, "self.layers"])


def test_no_attention_backend_is_asked_for_its_class():
    """TreeAttention is a proxy: an isinstance check on attn_backend would not see through it."""
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.runner import eager_runner

    def classes_asked(owner) -> list[str]:
        return [call for call in calls(owner, "isinstance") if "attn_backend" in call.partition(",")[0]]

    def control(runner):
        return isinstance(runner.attn_backend, int)

    assert classes_asked(model_runner) == classes_asked(eager_runner) == []
    assert classes_asked(control) == ["isinstance(runner.attn_backend, int)"]


def test_every_flag_that_support_reads_is_a_server_argument():
    from sglang.srt.server_args import ServerArgs

    names = set(ServerArgs.__struct_fields__)
    assert {name for name, _, _ in flag_support.FLAGS} - {*flag_support.NEWER} <= names
    assert {*kernel_settings.FLAGS, "enable_lora", "forward_hooks"} <= names
    assert {"load_format", "speculative_draft_load_format"} <= names
    assert {"enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup"} <= names
    assert {"lora_paths", "model_path", "speculative_draft_model_path", "speculative_algorithm"} <= names


def test_targets_that_bring_their_draft_layers_along():
    """draft_classes.py: the names that the engine turns into the class of a draft head, so that we leave them to it."""
    from sglang.srt.configs import model_config

    rewriting = inspect.getsource(model_config.ModelConfig._config_draft_model)
    names = {
        node.value
        for node in ast.walk(ast.parse(textwrap.dedent(rewriting)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[A-Z]\w+_?\w+", node.value)
    } | set(model_config.MIMO_V2_MODEL_ARCHS)
    left = {name for name in names if not draft_classes._DRAFT_CLASS.search(name)}
    assert "Qwen3NextForCausalLM" in left and left - {"DSPARK"} <= draft_classes.targets_with_drafts()
    assert all(name in left or draft_classes._DRAFT_CLASS.search(name) for name in draft_classes.targets_with_drafts())
    assert not draft_classes.has_own_draft_class("LlamaForCausalLM")
    for name in ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "", "Qwen2ForCausalLM", "MistralForCausalLM"):
        assert not draft_classes.has_own_draft_class(name)
    for name in ("Qwen2ForCausalLMEagle", "DeepseekV3ForCausalLMNextN", "Dots3NoteForCausalLM", "MiMoMTP"):
        assert draft_classes.has_own_draft_class(name)


@pytest.mark.parametrize("target", draft_classes.MTP_LAYERS)
def test_mtp_layers_of_targets(target: str):
    """draft_classes.py: the class that the engine loads for them, and which state it reads and hands on.

    A class that gave the logits processor the state before the last norm would hand that on.
    """
    import sys

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.registry import ModelRegistry

    config = SimpleNamespace(
        is_draft_model=True,
        speculative_algorithm="EAGLE",
        hf_config=SimpleNamespace(architectures=[target]),
        hf_text_config=SimpleNamespace(),
    )
    ModelConfig._config_draft_model(config)
    (name,) = config.hf_config.architectures
    assert name == draft_classes.MTP_LAYERS[target] and draft_classes.is_mtp_layer(name)
    assert not draft_classes.unsupported_draft_class(name)
    for one in (name, target):
        source = inspect.getsource(sys.modules[ModelRegistry.models[one].__module__])
        assert "hidden_states_before_norm" not in source
        assert ("forward_batch.spec_info.hidden_states" in source) == (one == name)
    assert hasattr(ModelRegistry.models[name], "set_embed_and_head")


def test_other_mtp_layers_are_left_to_the_engine():
    (reason,) = draft_classes.unsupported_draft_class("DeepseekV3ForCausalLMNextN")
    assert reason.startswith("MTP layer DeepseekV3ForCausalLMNextN: not one of MiMoMTP, ")
    assert draft_classes.unsupported_draft_class("Other")[0].startswith("draft head Other: not one of Llama")
