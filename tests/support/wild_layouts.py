"""The table of layouts of public heads: where each is public, and whether it is accepted, converted or refused."""

from __future__ import annotations

import torch
from wild_heads import ACCEPTED, AUX, CONVERTED, D, H, I, Layout, V, llama, speculators

OTHER_CLASS = ("which vLLM looks up as", "the plugin serves")
NO_PARAMETER = ("no parameter", "does not start", "eagle-plugin export")
EXPORT = ("is not a Llama draft head", "eagle-plugin export")  # SGLang cannot take it as it is, the export can
PICKLE = ("only pytorch_model.bin", "wanted model.safetensors", "the plugin reads no pickles", "convert")
MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LATENT_SIZES = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LATENT = {  # the first layer reads the embedding beside the hidden state
    "q_a_proj": (16, 2 * H),
    "q_b_proj": (4 * 24, 16),
    "kv_a_proj_with_mqa": (24, 2 * H),
    "kv_b_proj": (4 * 32, 16),
}
KV_NAMES = ("k_proj.weight", "v_proj.weight")
LATENT_ATTENTION = (
    "layers.0.self_attn.kv_a_proj_with_mqa.weight",
    "multi-head latent attention",
    "Eagle3DeepseekV2ForCausalLM",
    "serve them without the plugin",
)

LAYOUTS: dict[str, Layout] = {
    # SafeAILab/EAGLE ---------------------------------------------------------------------------------------------
    "official EAGLE-3": Layout(
        "SafeAILab/EAGLE eagle/model/cnets.py: midlayer, d2t as offsets, no embedding",
        llama("LlamaForCausalLM"),
        lambda r: r.eagle3(),
        EXPORT,
        CONVERTED,
    ),
    "official EAGLE-3, pickle": Layout(
        "SafeAILab/EAGLE README: most of its heads are one pytorch_model.bin, a pickle",
        llama("LlamaForCausalLM"),
        lambda r: r.eagle3(),
        PICKLE,
        PICKLE,
        vllm=PICKLE,
    ),
    "official EAGLE-1 and EAGLE-2": Layout(
        "names in sgl-project/sglang#5773: layers.0, no norm before it, fc without a bias, a copy of the embedding",
        llama("LlamaForCausalLM", draft_vocab_size=...),
        lambda r: r.eagle1(),
        EXPORT,
        CONVERTED,
    ),
    "official EAGLE-1, bias of fc": Layout(
        "SafeAILab/EAGLE eagle/model/cnets1.py: the key bias is that of fc",
        llama("LlamaForCausalLM", draft_vocab_size=..., bias=True),
        lambda r: r.eagle1() | {"fc.bias": r.vector(H)},
        EXPORT,
        CONVERTED,
    ),
    "bias of fc, SGLang's name": Layout(
        "the same head after its architecture was set by hand, as SGLang's documentation asks",
        llama("LlamaForCausalLMEagle", draft_vocab_size=...),
        lambda r: r.eagle1() | {"fc.bias": r.vector(H)},
        ACCEPTED,
        CONVERTED,
        vllm=OTHER_CLASS,
    ),
    "EAGLE-2 with norms": Layout(
        "vllm-project/speculators convert/eagle/eagle_converter.py: embed_layernorm, lm_head_layernorm (HASS)",
        llama("LlamaForCausalLM", draft_vocab_size=...),
        lambda r: r.eagle1() | {f"{n}_layernorm.weight": r.vector(H) for n in ("embed", "hidden", "lm_head")},
        ("embed_layernorm.weight", "a norm around", "wanted"),
        ("embed_layernorm.weight", "a norm around", "wanted"),
        vllm=("a norm around", "no parameter", "does not start"),
    ),
    # SpecForge ---------------------------------------------------------------------------------------------------
    "SpecForge": Layout(
        "sgl-project/SpecForge configs/deepseek-v3-671b-eagle3.json: ids are SGLang's",
        llama("LlamaForCausalLMEagle3", eagle_config={AUX: [1, 3, 5], "use_aux_hidden_state": True}),
        lambda r: r.eagle3(),
        ACCEPTED,
        CONVERTED,
        meant=(2, 4, 6),
    ),
    "SpecForge, prefix model.": Layout(
        "sgl-project/SpecForge specforge/modeling/draft: saved inside a wrapper",
        llama("LlamaForCausalLMEagle3", draft_vocab_size=V),
        lambda r: {f"model.{n}" if n != "lm_head.weight" else n: w for n, w in r.eagle3(draft=V).items()},
        ACCEPTED,
        CONVERTED,
        vllm=NO_PARAMETER,
    ),
    "Llama 4's type of layers": Layout(
        "SGLang's llama_eagle3.py: of model_type llama4_text it reads intermediate_size_mlp, vLLM's intermediate_size",
        llama("LlamaForCausalLMEagle3", model_type="llama4_text", intermediate_size=96, intermediate_size_mlp=I),
        lambda r: r.eagle3(),
        ACCEPTED,
        ("model_type 'llama4_text'", "Llama layers"),
        vllm=("gate_proj.weight of shape [128, 64]", "wanted [96, 64]"),
    ),
    "SpecForge, EAGLE-3.1": Layout(
        "sgl-project/SpecForge configs/qwen3-30B-A3B-eagle3.1.json: fc_norm, norm_output",
        llama("LlamaForCausalLMEagle3", fc_norm=True, norm_output=True, head_dim=16, sliding_window=None),
        lambda r: r.eagle3() | {f"fc_norm.{i}.weight": r.vector(H) for i in range(3)},
        ACCEPTED,
        CONVERTED,
    ),
    "SpecForge, aux norms": Layout(
        "SGLang's llama_eagle3.py: use_aux_norm and aux_norm_low, _mid, _high are older names of fc_norm",
        llama("LlamaForCausalLMEagle3", use_aux_norm=True),
        lambda r: r.eagle3() | {f"aux_norm_{part}.weight": r.vector(H) for part in ("low", "mid", "high")},
        ACCEPTED,
        CONVERTED,
        vllm=NO_PARAMETER,
    ),
    "SpecForge, Qwen3 MoE": Layout(
        "sgl-project/SpecForge specforge/modeling/draft/qwen3_moe_eagle.py",
        llama("Qwen3MoEForCausalLMEagle3", model_type="qwen3_moe", num_experts=4, moe_intermediate_size=16),
        lambda r: (
            {n: w for n, w in r.eagle3().items() if ".mlp." not in n and "hidden_norm" not in n}
            | {"hidden_norm.weight": r.vector(H), "midlayer.mlp.gate.weight": r.matrix(4, H)}
            | {f"midlayer.self_attn.{p}_norm.weight": r.vector(16) for p in "qk"}
            | {"midlayer.mlp.gate_weight": r.matrix(4, 16 * H).view(4, 16, H)}
        ),
        ("midlayer.mlp.gate.weight", "a mixture of experts", "wanted"),
        ("layers.0.mlp.gate.weight", "a mixture of experts", "wanted"),
        vllm=OTHER_CLASS,
    ),
    "SpecForge, gpt-oss MoE": Layout(
        "sgl-project/SpecForge configs/gpt-oss-20B-eagle3-moe.json",
        llama("GptOssForCausalLMEagle3", model_type="gpt_oss", num_local_experts=16, experts_per_token=4),
        lambda r: (
            {n: w for n, w in r.eagle3().items() if ".mlp." not in n}
            | {"midlayer.mlp.router.weight": r.matrix(4, H), "midlayer.mlp.experts.down_proj": r.matrix(4, 16)}
        ),
        ("midlayer.mlp.experts.down_proj", "a mixture of experts", "wanted"),
        ("layers.0.mlp.experts.down_proj", "a mixture of experts", "wanted"),
        vllm=OTHER_CLASS,
    ),
    "SpecForge, vision target": Layout(
        "sgl-project/SpecForge configs/qwen2-5-vl-7B-eagle3.json: mrope; its sliding_window is switched off",
        llama("LlamaForCausalLMEagle3", rope_scaling=MROPE, sliding_window=32768, use_sliding_window=False),
        lambda r: r.eagle3(),
        ACCEPTED,
        CONVERTED,
    ),
    # speculators -------------------------------------------------------------------------------------------------
    "speculators": Layout(
        "vllm-project/speculators src/speculators/models/eagle3/config.py: ids are vLLM's",
        speculators("eagle3", norm_before_residual=False, embed_requires_grad=False, **{AUX: [1, 3, 5]}),
        lambda r: r.eagle3("layers.0") | {"embed_tokens.weight": r.embedding.bfloat16()},
        EXPORT,
        CONVERTED,
    ),
    "speculators, norm before fc": Layout(
        "RedHatAI/gpt-oss-20b-speculator.eagle3: norm_before_fc, input_norm",
        speculators("eagle3", norm_before_residual=False, norm_before_fc=True),
        lambda r: r.eagle3("layers.0") | {"input_norm.weight": r.vector(3 * H)},
        EXPORT,
        CONVERTED,
    ),
    "speculators, norm before the residual": Layout(
        "RedHatAI's gpt-oss and Gemma 4 heads: norm_before_residual true, which is vLLM's default for this format",
        speculators("eagle3", norm_before_residual=True),
        lambda r: r.eagle3("layers.0"),
        EXPORT,
        ("norm_before_residual true", "SGLang", "train"),
    ),
    "norm before the residual, SGLang's name": Layout(
        "the same switch at the top level, where vLLM's llama_eagle3.py reads it and SGLang's does not",
        llama("LlamaForCausalLMEagle3", norm_before_residual=True),
        lambda r: r.eagle3(),
        ("norm_before_residual true", "does not read", "wanted false"),
        ("norm_before_residual true", "SGLang", "train"),
    ),
    "speculators, Qwen3 layer": Layout(
        "vLLM's qwen3_eagle3.py: transformer_layer_config of model_type qwen3, with norms of q and k",
        speculators("eagle3", {"model_type": "qwen3"}, norm_before_residual=False),
        lambda r: r.eagle3("layers.0") | {f"layers.0.self_attn.{p}_norm.weight": r.vector(16) for p in "qk"},
        ("layers.0.self_attn.k_norm.weight", "a norm of queries or keys", "wanted"),
        ("layers.0.self_attn.k_norm.weight", "a norm of queries or keys", "wanted"),
    ),
    "speculators, sliding window": Layout(
        "vllm-project/speculators#684: heads whose layer sees a window; vLLM reads layer_types, SGLang's head does not",
        speculators("eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 32}, norm_before_residual=False),
        lambda r: r.eagle3("layers.0"),
        EXPORT,
        CONVERTED,
    ),
    "speculators, trained embedding": Layout(
        "vllm-project/speculators eagle3/config.py: embed_requires_grad",
        speculators("eagle3", norm_before_residual=False, embed_requires_grad=True),
        lambda r: r.eagle3("layers.0") | {"embed_tokens.weight": 2 * r.embedding},
        EXPORT,
        ("an embedding of its own", "SGLang replaces", "train"),
    ),
    "speculators, EAGLE-1": Layout(
        "vllm-project/speculators convert/eagle/eagle_converter.py: fusion_fc, transformer",
        speculators("eagle", draft_vocab_size=None, fusion_bias=False, layernorms=False),
        lambda r: r.layer("transformer", H) | {"fusion_fc.weight": r.matrix(H, 2 * H)},
        ("fusion_fc.weight", "names of an older format", "wanted"),
        ("fusion_fc.weight", "names of an older format", "wanted"),
        vllm=("no fc.weight", "no EAGLE head"),
    ),
    # AngelSlim ---------------------------------------------------------------------------------------------------
    "AngelSlim": Layout(
        "Tencent/AngelSlim speculative/train: configs/qwen3-8b-eagle3.json, models/draft/llama_eagle3.py",
        llama("Eagle3LlamaForCausalLM", head_dim=16, rope_scaling=None, use_sliding_window=False),
        lambda r: r.eagle3() | {"embed_tokens.weight": r.embedding.clone()},
        EXPORT,
        CONVERTED,
    ),
    "AngelSlim, the target's number of layers": Layout(
        "Tencent/AngelSlim configs/qwen2.5-7b-eagle3.json: num_hidden_layers 28, where the head has one layer",
        llama("Eagle3LlamaForCausalLM", num_hidden_layers=7),
        lambda r: r.eagle3(),
        EXPORT,
        ("num_hidden_layers 7", "the weights of 1 layer(s)", "write 1"),
        vllm=("num_hidden_layers 7", "the weights of 1 layer(s)"),
    ),
    "AngelSlim, Hunyuan": Layout(
        "Tencent/AngelSlim configs/hunyuan-1.8b-eagle3.json: rope_scaling with alpha, which its trainer ignores",
        llama("Eagle3LlamaForCausalLM", rope_scaling=ALPHA, use_qk_norm=True, tie_word_embeddings=True),
        lambda r: r.eagle3(),
        EXPORT,
        ("alpha 1000.0", "which engines apply", "rope_scaling to null"),
    ),
    # ModelOpt ----------------------------------------------------------------------------------------------------
    "ModelOpt": Layout(
        "NVIDIA/Model-Optimizer modelopt/torch/export/plugins/hf_spec_export.py, hf_spec_configs.py",
        llama("LlamaForCausalLMEagle3", eagle_config=MODELOPT, attention_bias=False, mlp_bias=False),
        lambda r: {n: w for n, w in r.eagle3("layers.0").items() if n != "t2d"},
        ACCEPTED,
        CONVERTED,
    ),
    "ModelOpt, empty list of ids": Layout(
        "the same: eagle_aux_hidden_state_layer_ids is written as [] where the trainer chose its default",
        llama("LlamaForCausalLMEagle3", eagle_config=MODELOPT | {AUX: []}),
        lambda r: r.eagle3("layers.0"),
        ("[]", "captures no layer", "remove the key"),
        CONVERTED,
    ),
    "ModelOpt, no norm before lm_head": Layout(
        "NVIDIA/Model-Optimizer eagle/default_config.py: use_last_layernorm false",
        llama("LlamaForCausalLMEagle3", eagle_config=MODELOPT | {"use_last_layernorm": False}),
        lambda r: r.eagle3("layers.0"),
        ("eagle_config.use_last_layernorm False", "wanted True"),
        ("eagle_config.use_last_layernorm False", "wanted True"),
    ),
    "ModelOpt, Medusa heads": Layout(
        "NVIDIA/Model-Optimizer hf_spec_export.py: parallel_draft_heads",
        llama("LlamaForCausalLMEagle3", eagle_config=MODELOPT | {"parallel_draft_step": 2}),
        lambda r: r.eagle3("layers.0") | {"parallel_draft_heads.0.medusa_layers.0.linear.weight": r.matrix(H, H)},
        ("parallel_draft_heads.0", "a Medusa head", "wanted"),
        ("parallel_draft_heads.0", "a Medusa head", "wanted"),
        vllm=("a Medusa head", "no parameter", "does not start"),
    ),
    "ModelOpt, several first layers": Layout(
        "NVIDIA/Model-Optimizer mcore_llama.py: LlamaForCausalLMEagle3Deep, midlayer.0",
        llama("LlamaForCausalLMEagle3Deep", eagle_config=MODELOPT),
        lambda r: r.eagle3("midlayer.0"),
        ("midlayer.0.hidden_norm", "numbered first layers", "wanted"),
        ("layers.0.0.hidden_norm", "numbered first layers", "wanted"),
        vllm=OTHER_CLASS,
    ),
    "ModelOpt, Kimi K2": Layout(
        "NVIDIA/Model-Optimizer hf_spec_export.py: Eagle3DeepseekV2ForCausalLM, a class of both engines",
        llama("Eagle3DeepseekV2ForCausalLM", model_type="kimi_k2", num_key_value_heads=4, **LATENT_SIZES),
        lambda r: (
            {n: w for n, w in r.eagle3("layers.0").items() if not n.endswith(("q_proj.weight", *KV_NAMES))}
            | {f"layers.0.self_attn.{name}.weight": r.matrix(*shape) for name, shape in LATENT.items()}
            | {f"layers.0.self_attn.{name}_a_layernorm.weight": r.vector(16) for name in ("q", "kv")}
        ),
        LATENT_ATTENTION,
        LATENT_ATTENTION,
        vllm=("Eagle3DeepseekV2ForCausalLM", "the plugin serves"),
    ),
    "MiniMax M2's class name": Layout(
        "vLLM's registry.py: Eagle3MiniMaxM2ForCausalLM is its class for Llama layers under another name",
        llama("Eagle3MiniMaxM2ForCausalLM", rope_scaling=None),
        lambda r: r.eagle3("layers.0"),
        EXPORT,
        CONVERTED,
    ),
    "saved inside a wrapper": Layout(
        "any trainer that saves its wrapper: every name begins with draft_model.",
        llama("LlamaForCausalLMEagle3"),
        lambda r: {f"draft_model.{n}": w for n, w in r.eagle3().items()},
        ("not fc.weight", "random"),
        ("no fc.weight", "no EAGLE head"),
        vllm=("no fc.weight", "no EAGLE head"),
    ),
    # others ------------------------------------------------------------------------------------------------------
    "P-EAGLE": Layout(
        "vllm-project/vllm#32887 and aws-neuron/nkipy#70: mask_hidden, ptd_token_id, vLLM's names of later norms",
        llama("LlamaForCausalLMEagle3", ptd_token_id=3, parallel_drafting=True, num_hidden_layers=2),
        lambda r: (
            r.eagle3("layers.0") | r.layer("layers.1", H, "input_layernorm") | {"mask_hidden": r.matrix(1, 3 * H)}
        ),
        ("layers.1.hidden_norm.weight", "random"),
        CONVERTED,
    ),
    "P-EAGLE, attention biases": Layout(
        "vLLM's llama_eagle3.py: attention_bias of parallel drafting checkpoints",
        llama("LlamaForCausalLMEagle3", ptd_token_id=3, attention_bias=True),
        lambda r: r.eagle3("layers.0") | r.biases("layers.0") | {"mask_hidden": r.matrix(1, 3 * H)},
        ("k_proj.bias", "drops", "train"),
        ("k_proj.bias", "engines differ", "train"),
    ),
    "biases that are zero": Layout(
        "transformers' LlamaConfig: attention_bias true makes four biases, which start at zero",
        llama("LlamaForCausalLMEagle3", attention_bias=True),
        lambda r: r.eagle3() | r.biases("midlayer", 0.0),
        ("k_proj.bias", "drops", "train"),
        CONVERTED,
    ),
    "another key of the draft vocabulary": Layout(
        "nebius/EAGLE3-gpt-oss-20b: LlamaForCausalLM, truncated_vocab_size, YaRN",
        llama("LlamaForCausalLM", draft_vocab_size=..., truncated_vocab_size=D, rope_scaling=YARN),
        lambda r: r.eagle3("layers.0"),
        EXPORT,
        CONVERTED,
        vllm=("d2t of shape [128]", "wanted [512]"),
    ),
    "DeepSeek MTP": Layout(
        "vLLM's deepseek_mtp.py: eh_proj, enorm, hnorm",
        llama("DeepseekV3ForCausalLM", model_type="deepseek_v3"),
        lambda r: {"model.layers.7.eh_proj.weight": r.matrix(H, 2 * H), "model.layers.7.enorm.weight": r.vector(H)},
        ("eh_proj.weight", "a layer for multi-token prediction", "wanted"),
        ("eh_proj.weight", "a layer for multi-token prediction", "wanted"),
        vllm=("no fc.weight", "no EAGLE head"),
    ),
    "Qwen3-Next MTP": Layout(
        "vLLM's qwen3_next_mtp.py: mtp.",
        llama("Qwen3NextForCausalLM", model_type="qwen3_next"),
        lambda r: {"mtp.fc.weight": r.matrix(H, 2 * H), "mtp.norm.weight": r.vector(H)},
        ("mtp.fc.weight", "a layer for multi-token prediction", "wanted"),
        ("mtp.fc.weight", "a layer for multi-token prediction", "wanted"),
        vllm=("no fc.weight", "no EAGLE head"),
    ),
    "trained embedding without a key": Layout(
        "SafeAILab/EAGLE#303: does the head share the target's embedding?",
        llama("LlamaForCausalLM"),
        lambda r: r.eagle3() | {"embed_tokens.weight": r.embedding + 0.1},
        EXPORT,
        ("embed_tokens.weight", "other values than the target's", "SGLang replaces"),
    ),
    "switch without its key": Layout(
        "any trainer whose config.json lost norm_before_fc: the tensor alone says it",
        llama("LlamaForCausalLM"),
        lambda r: r.eagle3() | {"input_norm.weight": r.vector(3 * H)},
        EXPORT,
        ("input_norm.weight", "wanted only the tensors of an eagle3 head", "correct the key"),
    ),
    "two names for one parameter": Layout(
        "two exports in one folder",
        llama("LlamaForCausalLMEagle3"),
        lambda r: r.eagle3() | {"layers.0.hidden_norm.weight": torch.ones(H)},
        ("two tensors for layers.0.hidden_norm.weight", "wanted one", "remove"),
        ("two tensors for layers.0.hidden_norm.weight", "wanted one", "remove"),
        vllm=("two tensors for layers.0.hidden_norm.weight", "wanted one"),
    ),
}
