"""Public targets with a draft head of another project, by their ids on the Hugging Face hub (docs/targets.md).

None of them was run here: the hub cannot be reached from the machines on which this was written.
"""

from typing import NamedTuple

MXFP4_BITS = 4.25  # of a weight, with its share of a scale for 32 of them


class PublicModel(NamedTuple):
    """A target and a head that was trained for it."""

    name: str
    target: str
    head: str
    billions: float  # parameters in 16 bits, as the target's publisher gives them
    billions_mxfp4: float = 0.0  # and those of experts in MXFP4
    rewritten: bool = False  # whether SGLang wants the head as `eagle-plugin export` writes it; vLLM takes it as it is

    @property
    def weights_gb(self) -> float:
        """10^9 bytes of the target's weights; the head, the caches and the engine come on top."""
        return self.billions * 2 + self.billions_mxfp4 * MXFP4_BITS / 8


PUBLIC = {
    model.name: model
    for model in (
        PublicModel(
            "llama-3.1-8b-instruct",
            "meta-llama/Llama-3.1-8B-Instruct",
            "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B",
            8.0,
        ),
        PublicModel("qwen3-1.7b", "Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3", 1.7, rewritten=True),
        PublicModel("qwen3-4b", "Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3", 4.0, rewritten=True),
        PublicModel("qwen3-8b", "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3", 8.2, rewritten=True),
        PublicModel("qwen3-14b", "Qwen/Qwen3-14B", "RedHatAI/Qwen3-14B-speculator.eagle3", 14.8, rewritten=True),
        PublicModel("qwen3-32b", "Qwen/Qwen3-32B", "RedHatAI/Qwen3-32B-speculator.eagle3", 32.8, rewritten=True),
        PublicModel(
            "qwen3-coder-30b-a3b-instruct",
            "Qwen/Qwen3-Coder-30B-A3B-Instruct",
            "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE",
            30.5,
        ),
        PublicModel("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "nvidia/Qwen3-235B-A22B-Eagle3", 235.0),
        PublicModel("gpt-oss-20b", "openai/gpt-oss-20b", "amazon/GPT-OSS-20B-P-EAGLE", 1.8, 19.1),
        PublicModel("gpt-oss-120b", "openai/gpt-oss-120b", "lmsys/EAGLE3-gpt-oss-120b-bf16", 2.1, 114.7),
    )
}
HEADS = frozenset(model.head for model in PUBLIC.values())
