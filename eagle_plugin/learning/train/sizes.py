"""What the training of a head takes, from config.json files alone: its parameters, memory and arithmetic.

Parameters are counted on the head's own module, made without memory (torch's meta device). Activations are those that
`unroll.py`, `layers.py`, `attention.py` and `loss.py` keep for the backward, row by row; of P-EAGLE and block drafters,
whose masked rows come in segments, the attention of a segment is not counted. Every product counts two operations per
weight, three times where it is differentiated by its input and its weight.

Letters: N rows, H hidden size, h query heads, g key-value heads, D head size, I width of the MLP, K draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from eagle_plugin.heads.block_config import METHOD, is_block_drafter, options_of
from eagle_plugin.heads.draft_head import DraftHead, head_class
from eagle_plugin.heads.files import layer_config, read_config
from eagle_plugin.heads.kinds import BLOCK_DRAFTERS, find_spec
from eagle_plugin.heads.manifest import read_manifest
from eagle_plugin.heads.new_config import NORM_KEYS, new_head_config, window_keys
from eagle_plugin.heads.target_files import TargetShape
from eagle_plugin.heads.target_table import choose_kind
from eagle_plugin.learning.train.document_order import forward_limit
from eagle_plugin.learning.train.loss import CHUNK, TILE
from eagle_plugin.learning.train.methods import ParallelDrafting, method_of
from eagle_plugin.learning.train.recipe import HeadSettings, TrainRecipe
from eagle_plugin.models import head_folder

WIDE = 4  # bytes of a parameter, its gradient and a value of the optimiser


def unread_head(options: HeadSettings, folder: Path, aux_layers: tuple[int, ...], ids: int | None) -> DraftHead:
    """The head of a recipe without values, for the target in `folder`.

    ids: the size of a new head's draft vocabulary (None: all tokens).

    Raises:
        HeadError: the options do not go together, or a config.json cannot be read.
    """
    target = TargetShape(folder)
    if options.start is not None:
        ids = None  # its own
        kind, values, aux = _existing(options, aux_layers)
    else:
        kind = choose_kind(target.architecture) if options.kind == "auto" else options.kind
        shape: dict[str, Any] = {key: getattr(options, key) for key in _SHAPE}
        values = new_head_config(find_spec(kind), target, **shape | {"layers": options.layers or 1})
        aux = aux_layers
        if kind not in BLOCK_DRAFTERS and kind != "eagle2":
            values |= NORM_KEYS[options.norms or "3.1"] | window_keys(options.window, values["num_hidden_layers"])
            values |= {"draft_vocab_size": target.vocab_size, "target_hidden_size": target.hidden_size}
        values |= {"mask_token_id": 0, "block_size": options.block_size or 2, "is_causal": bool(options.causal)}
    if ids is not None and kind != "eagle2":
        values["draft_vocab_size"] = ids
    made: Any = head_class(find_spec(kind))
    with torch.device("meta"):
        head: DraftHead = made(LlamaConfig(**values)) if kind == "eagle2" else made(LlamaConfig(**values), aux)
    return head


_SHAPE = ("layers", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")


def _existing(options: HeadSettings, aux_layers: tuple[int, ...]) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    """(kind, keys of LlamaConfig, aux layers) of the head that a recipe starts from."""
    assert options.start is not None
    start = head_folder(options.start)
    written, manifest = read_config(start), read_manifest(start)
    values = layer_config(written)
    if manifest is not None:
        kind, aux = str(manifest["kind"]), manifest["aux_layers"]
    elif is_block_drafter(written):
        kind, aux = METHOD, tuple(options_of(written).get("target_layer_ids") or aux_layers)
    else:
        eagle3 = any("Eagle3" in name for name in written.get("architectures") or [])
        parallel = values.get("mask_token_id") is not None or values.get("ptd_token_id") is not None
        kind, aux = "peagle" if parallel else "eagle3" if eagle3 else "eagle2", aux_layers
    if options.kind not in ("auto", kind):
        kind = options.kind
        values["num_hidden_layers"] = options.layers or values["num_hidden_layers"]
    fixed = {"mask_token_id": 0, "bias": False, "attention_bias": False}
    values.pop("quantization_config", None)
    return kind, {"block_size": 2} | values | fixed, aux


@dataclass(frozen=True)
class TrainingSizes:
    """One training run on one process; bytes, and FLOPs of all processes together."""

    parameters: int  # that are trained
    state_bytes: int  # parameters, gradients and the optimiser
    frozen_bytes: int  # the embedding, the target's lm_head and what the teacher keeps of it
    activation_bytes: int  # what one forward keeps for its backward, with working copies of the weights
    loss_bytes: int  # the largest chunk of the loss
    checkpoint_bytes: int  # of the two that are kept
    flops_per_token: float

    @property
    def work_bytes(self) -> int:
        """What one forward and backward take, without the gradients of parameters."""
        return self.activation_bytes + self.loss_bytes

    @property
    def memory(self) -> int:
        """Bytes of one process."""
        return self.state_bytes + self.frozen_bytes + self.work_bytes


def training_sizes(
    settings: TrainRecipe,
    head: DraftHead,
    target_vocabulary: int,
    dtype_bytes: int,
    *,
    document: float,
    responses: float,
    processes: int = 1,
    device: str = "cpu",
) -> TrainingSizes:
    """What a recipe takes to train a head from `unread_head`.

    Args:
        target_vocabulary, dtype_bytes: of the target's embedding.
        document: mean tokens of a document. responses: the share of its tokens that are learnt from.
        processes: of torchrun. device: "cpu" or "cuda", which decides how much the loss computes at once.
    """
    config, loss = head.config, settings.loss
    hidden, vocabulary = config.hidden_size, len(head.d2t)
    own = head.own_lm_head
    trained = [p for p in head.parameters() if p.requires_grad and (loss.train_lm_head or p is not own)]
    count = sum(p.numel() for p in trained)
    size = 2 if settings.dtype == "bfloat16" else 4
    kept = 2 * count
    if settings.optimiser.name == "muon":
        kept -= sum(p.numel() for p in trained if p.dim() == 2 and min(p.shape) > 1 and p is not own)
    shards = processes if settings.parallel == "fsdp" else 1
    # The objective is one unit of FSDP: beside its part, a process has all parameters and gradients while it computes.
    gathered = 2 * count if shards > 1 else 0
    table = target_vocabulary * hidden
    frozen = table * dtype_bytes + table * size + (table * WIDE if own is None else 0)
    if vocabulary < target_vocabulary:
        frozen += (target_vocabulary if loss.teacher == "full" else vocabulary) * hidden * size
    rows = _Rows(settings, head, document, responses, processes, device)
    forwards = [rows.of(phase.steps, phase.batch_tokens) for phase in settings.phases]
    activations = max(_activations(head, forward, size) for forward in forwards)
    if own is not None:
        activations += own.numel() * (WIDE + (size if size < WIDE else 0))
    full = loss.teacher == "full"
    work = max(_loss_work(head, forward, size, target_vocabulary, device, full) for forward in forwards)
    flops = sum(
        phase.share * _flops(settings, head, forward, target_vocabulary)
        for phase, forward in zip(settings.phases, forwards, strict=True)
    )
    return TrainingSizes(
        parameters=count,
        state_bytes=WIDE * (2 * count + kept) // shards + WIDE * gathered,
        frozen_bytes=frozen,
        activation_bytes=round(activations),
        loss_bytes=round(work),
        checkpoint_bytes=2 * WIDE * (count + kept),
        flops_per_token=flops,
    )


@dataclass(frozen=True)
class _Forward:
    """One forward of one process over N tokens."""

    tokens: float
    document: float
    steps: int
    passes: float  # rows that go through the layers
    alive: float  # of them those whose activations exist at once
    scored: float  # rows that lm_head scores
    scored_alive: float
    taught: float  # rows of the target's distribution


class _Rows:
    """How many rows a forward has, by the method with which a kind of heads learns."""

    def __init__(
        self, settings: TrainRecipe, head: DraftHead, document: float, responses: float, processes: int, device: str
    ) -> None:
        self._settings, self._method, self._device = settings, method_of(head), device
        self._blocks = head.block_size is not None
        self._document, self._responses, self._processes = document, responses, processes

    def of(self, steps: int, batch_tokens: int | None) -> _Forward:
        """The forward of a phase."""
        settings, loss = self._settings, self._settings.loss
        tokens = (batch_tokens or settings.batch_tokens) / self._processes
        limit = forward_limit(settings.micro_tokens, self._device)
        if limit is not None:
            tokens = min(tokens, limit)
        tokens = max(tokens, self._document)
        answered = tokens * self._responses
        taught = min(tokens, answered + (steps - 1) * tokens / self._document)
        if self._blocks:
            anchors = answered * loss.keep_rate
            if loss.anchors and self._responses:  # so many of each document's
                anchors = min(anchors, loss.anchors * tokens / self._document)
            masked, passes, scored = anchors * (steps + 1), anchors * (steps + 1), anchors * steps
        elif isinstance(self._method, ParallelDrafting):
            masked = answered * sum(max(loss.keep_rate**d, loss.keep_floor) for d in range(1, steps))
            passes, scored = tokens + masked, answered + masked
        else:
            passes, scored = tokens * steps, answered * steps
            return _Forward(tokens, self._document, steps, passes, passes, scored, scored, taught)
        part = min(1.0, loss.segment_rows / masked) if masked else 1.0
        alive = passes - masked + part * masked
        return _Forward(tokens, self._document, steps, passes, alive, scored, part * scored, taught)


def _widths(head: DraftHead) -> tuple[int, int, int, int]:
    """(h D, g D, H, I)."""
    config = head.config
    dim = config.head_dim or config.hidden_size // config.num_attention_heads
    keys = (config.num_key_value_heads or config.num_attention_heads) * dim
    return config.num_attention_heads * dim, keys, config.hidden_size, config.intermediate_size


def _activations(head: DraftHead, forward: _Forward, size: int) -> float:
    """Bytes that one forward keeps, and the working copies of the layers' weights."""
    q, kv, hidden, width = _widths(head)
    layers, features = len(head.layers), head.fc.in_features
    # Of a layer: two normed inputs, q k v as they were made and with their rotation, attention's output with its
    # log-sum-exp, gate and up, and their product.
    in_layer = size * (2 * hidden + (q + 2 * kv) + (q + kv) + q + 3 * width) + WIDE * (
        head.config.num_attention_heads + 2
    )
    if head.block_size is not None:
        in_layer += size * (q + kv)  # their norms
    rotation = 2 * size * (q // head.config.num_attention_heads)
    after = 2 * size * hidden + WIDE  # the last norm, and the state that lm_head and the next step read
    before = size * (3 * hidden + q + 2 * kv)  # the fused state, the embedding, its norm and its part of q, k, v
    if head.aux_layers:
        before += size * features * (head.fc_norm is not None or head.input_norm is not None) + WIDE * len(
            head.aux_layers
        )
        before += features * size if size > 2 else 0  # the store has bfloat16
    else:  # the noise on the features
        before += (WIDE + size) * hidden
    weights = sum(p.numel() for p in head.layers.parameters())
    copies = size * weights
    if head.mask_token_id is not None:  # the gradients that segments sum: of the weights, and of what they share
        copies += WIDE * (weights + (0 if head.own_lm_head is None else head.own_lm_head.numel()))
        before += WIDE * (hidden + 2 * layers * kv)
    if head.block_size is not None:
        before += layers * 4 * size * kv  # keys and values of the context
    rows = forward.alive * (layers * in_layer + rotation + after) + forward.tokens * before
    scored = 2 * size * hidden + (0 if head.aux_layers else 3 * WIDE * hidden)  # EAGLE-2's distance to the next feature
    return rows + forward.scored_alive * scored + copies


def _loss_work(head: DraftHead, forward: _Forward, size: int, vocabulary: int, device: str, full: bool) -> float:
    """Bytes of one chunk of target rows while it is scored and differentiated."""
    own, hidden = len(head.d2t), head.config.hidden_size
    tile = max(8, TILE[device] // own)
    chunk = min(forward.taught, tile * max(1, CHUNK[device] // TILE[device]))
    slopes = chunk * min(1.0, forward.scored_alive / max(1.0, forward.taught * forward.steps)) * forward.steps
    logits = (chunk + slopes + (min(chunk * (vocabulary - own), chunk * own) / own if full else 0)) * own * size
    gradient = own * hidden * size if head.own_lm_head is not None else 0
    return logits + 3 * WIDE * min(chunk, tile) * own + gradient


def _flops(settings: TrainRecipe, head: DraftHead, forward: _Forward, vocabulary: int) -> float:
    """Operations per trained token."""
    q, kv, hidden, _ = _widths(head)
    layers = len(head.layers)
    matrices = sum(p.numel() for p in head.layers.parameters() if p.dim() > 1)
    embedded = hidden * (q + 2 * kv) if head.aux_layers and head.block_size is None else 0
    total = 6 * forward.passes * (matrices - embedded) + 4 * forward.tokens * embedded
    if head.aux_layers:
        total += 4 * forward.tokens * head.fc.weight.numel()
    else:
        total += (4 * forward.tokens + 6 * forward.passes) * hidden * hidden
    if head.block_size is not None:
        total += 6 * forward.tokens * layers * 2 * hidden * kv
    total += 7 * forward.passes * layers * q * forward.document
    own, loss = len(head.d2t), settings.loss
    columns = min(loss.columns, own) if loss.columns else own
    learns = head.own_lm_head is not None and loss.train_lm_head
    total += (6 if learns else 4) * forward.scored * columns * hidden
    total += 2 * forward.taught * (vocabulary if loss.teacher == "full" else own) * hidden
    return total / forward.tokens
