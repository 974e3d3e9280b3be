"""All that a prediction of the simulator rests on, in words, with the numbers that the code uses."""

from __future__ import annotations

from benchmarks import simulate_targets as targets
from benchmarks.simulate_published import HEADS
from benchmarks.simulate_rounds import NOISE
from benchmarks.simulate_traces import CAPS

PARALLEL = "P-EAGLE 7"
PARALLEL_LAYERS = 4  # of the published heads


def assumptions(context: int, fixed: float) -> list[str]:
    """One entry per assumption; fixed: seconds that were fitted to the EAGLE-3 paper's engine."""
    heads = "; ".join(
        f"{name}: {head.accept_length} in trees of {head.shape} ({head.source})" for name, head in HEADS.items()
    )
    return [
        f"Every request has {context} tokens of prefix and never ends. Prefills, queues and the host are left out, "
        "and the memory's size: the largest batches may not fit.",
        "A forward takes the root of the sum of the squares of its memory time and its compute time: bytes over "
        f"{targets.MEMORY_EFFICIENCY:g} of the bandwidth, FLOPs over {targets.COMPUTE_EFFICIENCY:g} of the dense bf16 "
        "peak of NVIDIA's data sheets. Weights and cache are bf16, GPT-OSS's experts have 4.25 bits per weight. Logits "
        "are float32, written and read once.",
        f"Each layer takes {us(targets.DENSE_GAP)} more in a dense model and {us(targets.MOE_GAP)} in a mixture of "
        "experts: from two published speeds of plain decoding, and used for all devices.",
        "Keys and values are read at the same bandwidth; attention computes at "
        f"{targets.ATTENTION_EFFICIENCY:g} of the peak. Every other layer of GPT-OSS-120B attends to 128 tokens; these "
        "layers' keys count as free.",
        "Experts: a forward over R rows reads E (1 - (1 - k / E)^R) of E experts per layer, as if the rows chose "
        "independently. Rows of one tree choose more alike, so that verification is cheaper than assumed.",
        f"Llama-3.3-70B is split over 8 GPUs. Two all-reduces per layer take {us(targets.ALL_REDUCE)} each and bytes "
        f"over {targets.NVLINK / 1e9:.0f} GB/s. Its head is split too, without all-reduces.",
        f"A forward of the head takes {us(targets.FORWARD)} besides its roofline. A round has "
        f"{us(targets.OVERLAPPED)} of small kernels, assumed for engines whose host works ahead. The engine of the "
        f"EAGLE-3 paper needed {fixed * 1e3:.1f} ms, which was fitted; only the comparison uses it.",
        "After 32 plain rounds of the policy the head reads their tokens. Plain decoding, the unit of all speed-ups, "
        "has no head.",
        "no head.",
        "Acceptance: synthetic traces of a head whose scores are calibrated, and whose difficulty varies slowly along "
        f"a text. Accept lengths that they are calibrated to: {heads}.",
        f"A smaller tree takes its nodes from the candidates of {CAPS}, by the rule of policy/path_sums.py.",
        f"{PARALLEL}: one forward of a head with {PARALLEL_LAYERS} layers per round. Its chains are taken to be "
        "accepted as often as those of the EAGLE-3 head, which is not known.",
        f"The policy's times have {NOISE:.0%} noise. Its tables are at powers of two and halfway between. Its probes "
        "count.",
    ]


def us(seconds: float) -> str:
    """A number of microseconds, for print."""
    return f"{seconds * 1e6:.0f} us"
