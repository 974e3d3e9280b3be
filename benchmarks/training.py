"""The speed of training a head: tokens per second of one optimiser step, by draft steps, on random features.

    python benchmarks/training.py                        # the SmolLM2-135M head, 1, 3 and 4 steps
    python benchmarks/training.py --kind peagle --steps 8
    python benchmarks/training.py --teacher draft --draft-vocab 16384 --columns 0 3072      # the whole softmax, a part
    python benchmarks/training.py --profile              # where the time goes
    python benchmarks/training.py --peer                 # beside speculators' EAGLE-3 module, where it is installed
    python benchmarks/training.py --kind peagle --peer --steps 4 8 16 --length 1024    # beside its P-EAGLE module

"peak MB" is the most memory that the tensors of one step have at once, without parameters and optimiser.
A token is a row of the batch, prompt or response. Configurations are interleaved. The wall clock counts what other
processes take; the processor's time does not, so "tokens/s (busy)" is what the threads would do undisturbed.

With --peer both train the same part of the same head against the same teacher: lm_head frozen, the target's
distribution over the draft vocabulary alone, bfloat16 under float32 masters, fused AdamW.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

# Fresh pages come at a tenth of the speed of used memory; glibc reads these at its start only.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
if __name__ == "__main__" and any(os.environ.get(key) != value for key, value in MEMORY.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MEMORY)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from benchmarks.live_memory import LiveMemory  # noqa: E402
from eagle_plugin.common.devices import fast_dtype  # noqa: E402
from eagle_plugin.heads.draft_head import DraftHead  # noqa: E402
from eagle_plugin.heads.eagle2 import Eagle2Head  # noqa: E402
from eagle_plugin.heads.eagle3 import Eagle3Head  # noqa: E402
from eagle_plugin.heads.peagle import PEagleHead  # noqa: E402
from eagle_plugin.learning.data.store.features import Readout  # noqa: E402
from eagle_plugin.learning.train.batches import Batch  # noqa: E402
from eagle_plugin.learning.train.methods import ObjectiveSettings  # noqa: E402
from eagle_plugin.learning.train.model import DTYPES  # noqa: E402
from eagle_plugin.learning.train.objectives import Objective  # noqa: E402

VOCAB, HIDDEN, AUX = 49152, 576, (2, 15, 27)


def make_head(kind: str, draft_vocab: int, norms: str) -> DraftHead:
    """A random head of the size of SmolLM2-135M's."""
    modern: dict[str, Any] = {"fc_norm": True, "norm_output": True} if norms == "3.1" and kind == "eagle3" else {}
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "mask_token_id": VOCAB - 1,
    }
    config = LlamaConfig(**shape, **modern)
    if kind == "eagle2":
        head: DraftHead = Eagle2Head(config)
    else:
        head = (PEagleHead if kind == "peagle" else Eagle3Head)(config, AUX)
        head.d2t.copy_(torch.arange(draft_vocab) * (VOCAB // draft_vocab - 1))
    head.embedding.normal_(std=0.02)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return head


def make_batch(tokens: int, length: int) -> Batch:
    """Documents of `length` tokens, the first quarter of each a prompt."""
    count = max(1, tokens // length)
    rows = count * length
    return Batch(
        ids=torch.randint(0, VOCAB - 1, (rows,)),
        mask=(torch.arange(length) >= length // 4).repeat(count),
        starts=torch.arange(count + 1) * length,
        aux=torch.randn(rows, len(AUX) * HIDDEN).bfloat16(),
        last=torch.randn(rows, HIDDEN).bfloat16(),
    )


class TimedTrainer(ABC):
    """A module, its optimiser and a batch."""

    def __init__(self, name: str, module: nn.Module, batch: Batch) -> None:
        self.name, self.batch = name, batch
        self.learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(self.learnt, lr=1e-4, fused=True)
        self.seconds: list[float] = []
        self.busy: list[float] = []

    @abstractmethod
    def loss(self) -> torch.Tensor:
        """Of one forward over the batch."""

    def peak_bytes(self) -> int:
        """The memory of the tensors that one forward and backward make, gradients included."""
        with LiveMemory() as memory:
            self.loss().backward()
        self.optimiser.zero_grad()
        return memory.peak

    def step(self) -> None:
        """Train on the batch once and note the time."""
        start, busy = time.perf_counter(), time.process_time()
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.learnt, 0.5)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.busy.append(time.process_time() - busy)


class Ours(TimedTrainer):
    """This package's objective."""

    def __init__(self, options: argparse.Namespace, steps: int, columns: int) -> None:
        torch.manual_seed(0)
        head = make_head(options.kind, options.draft_vocab, options.norms)
        dtype = DTYPES[options.dtype]
        readout = Readout(torch.randn(VOCAB, HIDDEN).mul_(0.05).to(dtype), None)
        settings = ObjectiveSettings(
            steps=steps,
            teacher=options.teacher,
            loss=options.loss,
            columns=columns,
            dtype=dtype,
            train_lm_head=not options.peer,
            segment_rows=options.segment_rows,
        )
        self.objective = Objective(head, readout, settings)
        name = f"ours, {steps}" + (f", {columns} columns" if columns else "")
        super().__init__(name, self.objective, make_batch(options.batch_tokens, options.length))

    def loss(self) -> torch.Tensor:
        plan = self.objective.plan(self.batch, len(self.seconds))
        return self.objective(self.batch, plan, plan.totals).loss


class Speculators(TimedTrainer):
    """The module of speculators, called as its trainer does, with the attention that has a backward on a CPU."""

    def __init__(self, options: argparse.Namespace, steps: int) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

        torch.manual_seed(0)
        modern = options.norms == "3.1" and options.kind == "eagle3"
        shape = make_head(options.kind, options.draft_vocab, options.norms).config
        shape._attn_implementation = "sdpa"
        values: dict[str, Any] = {
            "transformer_layer_config": shape,
            "draft_vocab_size": options.draft_vocab,
            "norm_before_residual": False,
            "fc_norm": modern,
            "norm_output": modern,
            "eagle_aux_hidden_state_layer_ids": list(AUX),
        }
        self.call: dict[str, Any] = {"loss_config": resolve_loss_config("ce", "eager")}
        if options.kind == "peagle":
            self.model = PEagleDraftModel(config=PEagleSpeculatorConfig(mask_token_id=VOCAB - 1, **values)).float()
            self.call |= {"num_depths": steps, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
        else:
            self.model = Eagle3DraftModel(config=Eagle3SpeculatorConfig(**values)).float()
            self.call |= {"ttt_steps": steps, "ttt_step_loss_decay": 0.8}
        for name, parameter in self.model.named_parameters():
            nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.02)
            parameter.requires_grad_(not name.startswith(("verifier", "embed_tokens", "lm_head")))
        super().__init__(f"speculators, {steps}", self.model, make_batch(options.batch_tokens, options.length))

    def loss(self) -> torch.Tensor:
        batch = self.batch
        assert batch.aux is not None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, _ = self.model(
                hidden_states=batch.aux[None],
                input_ids=batch.ids.roll(-1)[None],
                document_ids=batch.document[None],
                loss_mask=batch.mask.roll(-1)[None],
                position_ids=batch.positions[None] + 1,
                verifier_last_hidden_states=batch.last.roll(-1, 0)[None],
                **self.call,
            )
        return loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("eagle2", "eagle3", "peagle"), default="eagle3")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 4], help="draft steps (default: 1 3 4)")
    parser.add_argument("--norms", choices=("3.0", "3.1"), default="3.1")
    parser.add_argument("--teacher", choices=("full", "draft"), default="full")
    parser.add_argument("--loss", choices=("ce", "lk"), default="ce")
    parser.add_argument("--columns", type=int, nargs="+", default=[0], help="of lm_head per chunk; 0: all (default)")
    parser.add_argument("--dtype", choices=list(DTYPES), default=fast_dtype("cpu"), help="default: %(default)s, here")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256, help="tokens of a document (default: 256)")
    parser.add_argument("--segment-rows", type=int, default=2048, help="P-EAGLE: masked rows at once (default: 2048)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="compare with speculators: same head, teacher draft")
    parser.add_argument("--profile", action="store_true", help="print the operations that take the time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peer:
        if options.kind == "eagle2" or importlib.util.find_spec("speculators") is None:
            parser.error(
                "--peer wants --kind eagle3 or peagle and the package speculators; install it, or leave it out"
            )
        options.teacher, options.dtype = "draft", "bfloat16"

    trainers: list[TimedTrainer] = []
    for steps in options.steps:
        trainers += [Ours(options, steps, columns) for columns in options.columns]
        trainers += [Speculators(options, steps)] if options.peer else []
    for trainer in trainers:
        trainer.step()  # warm up: pages, oneDNN's kernels
        trainer.seconds.clear()
        trainer.busy.clear()
    for _ in range(options.rounds):
        for trainer in trainers:
            trainer.step()
    title = (
        f"{options.kind}, {options.dtype}, {options.threads} threads, documents of {options.length} tokens, "
        f"teacher {options.teacher}"
    )
    table = Table("steps", "tokens", "median s", "tokens/s", "fastest", "tokens/s (busy)", "peak MB", title=title)
    table.columns[0].no_wrap = True
    for trainer in trainers:
        tokens, median = len(trainer.batch), statistics.median(trainer.seconds)
        busy = tokens * options.threads / statistics.median(trainer.busy)
        speeds = (f"{speed:,.0f}" for speed in (tokens / median, tokens / min(trainer.seconds), busy))
        peak = f"{trainer.peak_bytes() / 1e6:,.0f}"
        table.add_row(trainer.name, f"{tokens:,}", f"{median:.3f}", *speeds, peak)
    Console().print(table)
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainers[-1].step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))
    return 0


if __name__ == "__main__":
    sys.exit(main())
