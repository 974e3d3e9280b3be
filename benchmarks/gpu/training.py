"""Step `training`: heads learn on the device what they learn on a CPU, and how fast.

Loss and gradients of every kind of head on random features, in bfloat16 on the device and on the CPU, against float32
on the CPU: the device may be at most TWICE as far off as the CPU, and a little. On a GPU, attention over packed
documents is another kernel than on a CPU. Then tokens per second of whole updates, with heads of two targets' sizes.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.server import need_modules
from benchmarks.gpu.steps import Setting, StepError
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.learning.data.store.features import Readout
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.methods import ObjectiveSettings
from eagle_plugin.learning.train.objectives import Objective

KINDS = ("eagle2", "eagle3", "peagle")
TWICE, SLACK = 2.0, 0.01  # of the distance from float32, relative to the norm
UPDATES, WARM_UP = 10, 3
LAYERS = 3  # of the target that EAGLE-3 reads


class Size(NamedTuple):
    """A target's sizes, and its draft vocabulary."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    drafts: int


TINY = Size("tiny", 64, 128, 2, 1, 256, 128)
SMALL = Size("SmolLM2-135M", 576, 1536, 9, 3, 49152, 16384)
LARGE = Size("Llama-3.1-8B", 4096, 14336, 32, 8, 128256, 32000)


def run(setting: Setting) -> dict[str, Any]:
    """Compare every kind of head, then measure; StepError where the device is further off than the CPU."""
    need_modules("transformers")
    compared: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    for kind in KINDS:
        compared.append(compare(kind, TINY if setting.tiny else SMALL, setting))
        setting.keep({"compared": compared, "speeds": speeds})
    sizes, tokens = ((TINY,), 256) if setting.tiny else ((SMALL, LARGE), 8192)
    for size in sizes:
        speeds.append(measure(size, tokens, setting))
        setting.keep({"compared": compared, "speeds": speeds})
    worst = max(row["device_error"] for row in compared)
    sentences = [f"loss and gradients as on the CPU: at most {worst:.3f} from float32 in bfloat16"]
    for row in speeds:
        memory = f", {row['peak_gib']} GiB" if row["peak_gib"] else ""
        sentences.append(f"a head of {row['target']}'s size: {row['tokens_per_s']:,} tokens/s{memory}")
    return {"compared": compared, "speeds": speeds, "summary": sentences}


def make_head(kind: str, size: Size) -> DraftHead:
    """A random head on the CPU, in float32."""
    from transformers import LlamaConfig

    from eagle_plugin.heads.eagle2 import Eagle2Head
    from eagle_plugin.heads.eagle3 import Eagle3Head
    from eagle_plugin.heads.peagle import PEagleHead

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        draft_vocab_size=size.drafts,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=1,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=128 if size is LARGE else 64 if size is SMALL else 32,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        mask_token_id=size.vocabulary - 1,
    )
    if kind == "eagle2":
        head: DraftHead = Eagle2Head(config)
    else:
        head = (PEagleHead if kind == "peagle" else Eagle3Head)(config, tuple(range(LAYERS)))
        head.d2t.copy_(torch.arange(size.drafts) * (size.vocabulary // size.drafts - 1))
    head.embedding.normal_(std=0.5)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    return head


def make_batch(size: Size, lengths: list[int]) -> Batch:
    """Documents on the CPU, the first quarter of each a prompt."""
    rows = sum(lengths)
    return Batch(
        ids=torch.randint(0, size.vocabulary - 1, (rows,)),
        mask=torch.cat([torch.arange(n) >= n // 4 for n in lengths]),
        starts=torch.tensor([0, *lengths]).cumsum(0),
        aux=torch.randn(rows, LAYERS * size.hidden).bfloat16(),
        last=torch.randn(rows, size.hidden).bfloat16(),
    )


def learn(kind: str, size: Size, batch: Batch, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, on the CPU in float32; the same head and draws for every call."""
    torch.manual_seed(1)
    head = make_head(kind, size).to(device)
    readout = Readout(torch.randn(size.vocabulary, size.hidden).mul_(2 / math.sqrt(size.hidden)).to(device), None)
    objective = Objective(head, readout, ObjectiveSettings(steps=4, dtype=dtype))
    here = batch.to(device)
    plan = objective.plan(here, seed=1)
    loss = objective(here, plan, plan.totals).loss
    loss.backward()
    found = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
    return {name: value.detach().float().cpu() for name, value in {"loss": loss, **found}.items()}


def compare(kind: str, size: Size, setting: Setting) -> dict[str, Any]:
    """How far the device and the CPU are from float32, by the worst tensor; StepError where the device is too far."""
    torch.manual_seed(0)
    lengths = [3, 17, 64, 1, 40] if setting.tiny else [5, 700, 1, 333, 64, 2, 129]
    batch = make_batch(size, lengths)
    wanted = learn(kind, size, batch, torch.float32, "cpu")
    on_cpu = distances(learn(kind, size, batch, torch.bfloat16, "cpu"), wanted)
    on_device = distances(learn(kind, size, batch, torch.bfloat16, setting.device), wanted)
    for name, distance in on_device.items():
        allowed = TWICE * on_cpu[name] + SLACK
        if not distance <= allowed:
            raise StepError(
                f"{kind}: {name} on {setting.device} in bfloat16 is {distance:.3g} of its norm from that in float32, "
                f"wanted at most {allowed:.3g}: the kernels of this torch for training differ from those of the CPU"
            )
    return {
        "kind": kind,
        "tensors": len(wanted),
        "device_error": round(max(on_device.values()), 4),
        "cpu_error": round(max(on_cpu.values()), 4),
    }


def distances(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The distance of every tensor from the wanted one, relative to its norm."""
    if found.keys() != wanted.keys():
        raise StepError(f"gradients of {sorted(found)}, wanted {sorted(wanted)}")
    return {name: float((found[name] - goal).norm() / goal.norm().clamp(min=1e-12)) for name, goal in wanted.items()}


def measure(size: Size, tokens: int, setting: Setting) -> dict[str, Any]:
    """Tokens per second of updates of an EAGLE-3 head: 4 draft steps, AdamW, the target's features at hand."""
    torch.manual_seed(0)
    head = make_head("eagle3", size).to(setting.device)
    readout = Readout(torch.randn(size.vocabulary, size.hidden).mul_(0.05).to(setting.device, torch.bfloat16), None)
    objective = Objective(head, readout, ObjectiveSettings(steps=4))
    learnt = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learnt, lr=1e-4, fused=True)
    batch = make_batch(size, [min(512, tokens)] * max(1, tokens // 512)).to(setting.device)
    seconds = []
    for update in range(2 if setting.tiny else WARM_UP + UPDATES):
        began = time.perf_counter()
        plan = objective.plan(batch, update)
        objective(batch, plan, plan.totals).loss.backward()
        nn.utils.clip_grad_norm_(learnt, 0.5)
        optimiser.step()
        optimiser.zero_grad()
        if setting.on_gpu:
            torch.cuda.synchronize(setting.device)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[-UPDATES:])
    peak = torch.cuda.max_memory_allocated(setting.device) / 2**30 if setting.on_gpu else 0
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    return {
        "target": size.name,
        "draft_vocabulary": size.drafts,
        "tokens": len(batch),
        "update_ms": round(median * 1e3, 2),
        "tokens_per_s": round(len(batch) / median),
        "peak_gib": round(peak, 2),
    }
