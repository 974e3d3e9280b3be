"""Which targets give the inputs of middle layers to an EAGLE-3 head, and with which ids each engine names them.

Facts about SGLang and vLLM, kept as tables so that neither engine has to be installed; a test compares
them with both engines' sources. "aux layers" are layers whose INPUT is captured: id i is `hidden_states[i]` of
transformers. vLLM writes the same number; SGLang has its own, by the rules below. torch is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from eagle_plugin.heads.files import HeadError

# How a SGLang class turns an id v of `eagle_config` into the layer whose input it captures:
#   output        v + 1: the id names the layer whose output is wanted
#   first_is_one  v + 1 when the first id is 1, else v
#   up_to_last    v + 1, but v when the largest id is the number of layers
#   shifted       v + 1, and without ids it captures its default one layer later than all other classes
AuxRule = Literal["output", "first_is_one", "up_to_last", "shifted"]

_OUTPUT = """
    ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
    Cosmos3ForConditionalGeneration ExaoneMoEForCausalLM ExaoneMoeForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration Glm4MoeForCausalLM Glm5NextForConditionalGeneration IQuestCoderForCausalLM
    InternLM3ForCausalLM InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM
    LongcatFlashForCausalLM MellumForCausalLM MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM Ministral3ForCausalLM
    MistralForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2_5_VLForConditionalGeneration
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration SarvamMoEForCausalLM TeleFLMForCausalLM
"""
_FIRST_IS_ONE = """
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
    KimiK25ForConditionalGeneration MistralLarge3ForCausalLM
"""
# SGLang's classes that capture the output of the last layer too, before the final norm, as the input of one more.
_LAST = """
    Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration GptOssForCausalLM MiniMaxM3SparseForCausalLM
"""
# SGLang chooses their attention backend by their class, on GPUs of capability 10 trtllm_mha, with which it takes chains
# alone and ends with a tree.
_CHAINED = """
    BeamForCausalLM Exaone4ForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GptOssForCausalLM Llama4ForCausalLM
    Llama4ForConditionalGeneration Olmo2ForCausalLM
"""
# vLLM's own classes; those that it serves through transformers are not listed.
_VLLM = """
    AfmoeForCausalLM ApertusForCausalLM Cohere2MoeForCausalLM CohereCompassForConditionalGeneration
    Cosmos3ForConditionalGeneration DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration
    Ernie4_5ForCausalLM Exaone4_5_ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration Glm5NextForCausalLM Glm5NextForConditionalGeneration GlmMoeDsaForCausalLM
    GptOssForCausalLM GraniteForCausalLM GraniteSWAForCausalLM IQuestCoderForCausalLM InternLM3ForCausalLM
    InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration K2HorizonForCausalLM KimiK25ForConditionalGeneration
    KimiK3ForConditionalGeneration KimiLinearForCausalLM LLaMAForCausalLM LagunaForCausalLM
    LightOnOCRForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM
    LlavaForConditionalGeneration MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM
    MiniCPM3ForCausalLM MiniCPMForCausalLM MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
    MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM
    Mistral3ForConditionalGeneration MistralForCausalLM MistralLarge3ForCausalLM MuseGlimmerForCausalLM
    MuseGlimmerForConditionalGeneration NemotronHForCausalLM NemotronHPuzzleForCausalLM
    NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3
    NemotronH_Super_Omni_Reasoning_V3 OpenCUAForConditionalGeneration Phi3ForCausalLM
    PixtralForConditionalGeneration Plamo3ForCausalLM Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration
    Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3NextForCausalLM Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration SarvamMLAForCausalLM Step1ForCausalLM
    TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM
"""
SGLANG_TARGETS: dict[str, AuxRule] = {
    **dict.fromkeys(_OUTPUT.split(), "output"),
    **dict.fromkeys(_FIRST_IS_ONE.split(), "first_is_one"),
    "GptOssForCausalLM": "up_to_last",
    "MiniMaxM3SparseForConditionalGeneration": "shifted",
}
SGLANG_LAST = frozenset(_LAST.split())
VLLM_TARGETS = frozenset(_VLLM.split())
SGLANG_CHAINED = frozenset(_CHAINED.split())
# Capture works here, but EAGLE-2 is what managed services train for this architecture.
PREFER_EAGLE2 = frozenset({"Qwen3NextForCausalLM"})


def choose_kind(architecture: str) -> Literal["eagle2", "eagle3"]:
    """The kind of head that both engines can serve on a target: EAGLE-3 where both capture its middle layers."""
    captured = architecture in SGLANG_TARGETS and architecture in VLLM_TARGETS
    return "eagle3" if captured and architecture not in PREFER_EAGLE2 else "eagle2"


def engines_default(layers: int) -> tuple[int, ...]:
    """The layers that vLLM and SGLang (except `shifted` classes) capture for a head that names none."""
    return 2, layers // 2, layers - 3


def are_layers(aux_layers: Sequence[int], layers: int, first: int = 1, last: int | None = None) -> bool:
    """Whether both engines can capture the inputs of these layers of a target with so many: rising, from 1 on.

    first: the least that is wanted; 0 is the embedding. last: the greatest that can be captured (default: the last
    layer's; `last_boundary`).
    """
    rising = all(a < b for a, b in zip(aux_layers, aux_layers[1:], strict=False))
    greatest = layers - 1 if last is None else last
    return bool(aux_layers) and rising and aux_layers[0] >= first and aux_layers[-1] <= greatest


def last_boundary(architecture: str, layers: int) -> int:
    """The greatest layer whose input SGLang captures: one more than there are, which is the output of the last layer,
    before the final norm, in the classes that capture it."""
    return layers if architecture in SGLANG_LAST else layers - 1


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """The engines' default layers.

    Raises:
        HeadError: the target has too few layers for three different ones.
    """
    default = engines_default(layers)
    if not are_layers(default, layers):
        raise HeadError(
            f"the default aux layers {list(default)} of a target with {layers} layers are not three different layers; "
            "name the aux layers"
        )
    return default


def sglang_ids(architecture: str, aux_layers: Sequence[int], layers: int) -> list[int]:
    """The ids with which SGLang captures the input of `aux_layers` on a target with `layers` layers.

    Raises:
        HeadError: no ids make SGLang capture these layers.
    """
    wanted = tuple(aux_layers)
    for ids in ([i - 1 for i in wanted], list(wanted)):
        if min(ids) >= -1 and sglang_layers(architecture, ids, layers) == wanted:
            return ids
    raise HeadError(
        f"aux layers {list(wanted)} of a {architecture} with {layers} layers cannot be captured by SGLang; "
        "choose a first layer other than 1"
    )


def sglang_layers(architecture: str, ids: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """The layers whose input SGLang captures for `eagle_config` ids (None: the key is missing).

    An architecture that is not in the table gets the rule of most classes.
    """
    rule = SGLANG_TARGETS.get(architecture, "output")
    if ids is None:
        shift = 1 if rule == "shifted" else 0
        return tuple(i + shift for i in engines_default(layers))
    if rule == "first_is_one" and list(ids[:1]) != [1]:
        return tuple(ids)
    if rule == "up_to_last" and max(ids, default=0) == layers:
        return tuple(ids)
    return tuple(i + 1 for i in ids)
