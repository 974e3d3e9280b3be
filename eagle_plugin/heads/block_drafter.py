"""Block drafters (DFlash): what their files hold, and whether an engine's class computes what our worker asks of it.

They are other models than EAGLE heads: layers of Qwen3 whose queries are the root token and masks, and whose other keys
and values are made of the target's states. `heads.dflash` has the module. No engine is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.heads.block_config import (
    ALGORITHM,
    ARCHITECTURE,
    METHOD,
    block_rows,
    is_block_drafter,
    is_causal,
    options_of,
)
from eagle_plugin.heads.checkpoint import check_shapes, check_values, size_of
from eagle_plugin.heads.description import HeadDescription, read_head
from eagle_plugin.heads.files import HeadError, LeftToEngine, StoredTensor, check_mask_token, read_size, text_config
from eagle_plugin.heads.other_layouts import SLIDING
from eagle_plugin.heads.target_config import read_target_config
from eagle_plugin.heads.vllm_rules import draft_vocabulary

_LAYER = "layers.{}."
_TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


class Engine(NamedTuple):
    """What differs between the engines."""

    name: str
    chosen: str  # what of its flags chooses block drafters
    served: str  # with which flag it serves them
    tokens: str  # the flag of the drafted tokens
    counted: int  # of the block's tokens the flag does not count so many
    reads_tables: bool  # whether its class reads an embedding, an output layer and a draft vocabulary of the drafter
    reads_speculators: bool  # whether it reads the config.json of speculators


VLLM = Engine(
    name="vLLM",
    chosen=f"--speculative-config has method {METHOD}",
    served=f'"method": "{METHOD}" in --speculative-config',
    tokens="num_speculative_tokens",
    counted=1,
    reads_tables=True,
    reads_speculators=True,
)
SGLANG = Engine(
    name="SGLang",
    chosen=f"--speculative-algorithm is {ALGORITHM}",
    served=f"--speculative-algorithm {ALGORITHM}",
    tokens="--speculative-num-draft-tokens",
    counted=0,
    reads_tables=False,
    reads_speculators=False,
)
ENGINES = (VLLM, SGLANG)


class BlockInfo(NamedTuple):
    """What the checkpoint of a block drafter contains."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layers: tuple[int, ...]  # layers of the target whose OUTPUT it reads, counted from 0
    num_layers: int
    block: int | None  # rows that it was trained with, the root's included; None where config.json does not say
    causal: bool  # whether a row of the block sees only the rows up to its own
    mask_token: int
    dtype: str
    parameters: int
    bytes: int


def describe_block(target_dir: str | Path, head_dir: str | Path, engine: Engine = VLLM) -> BlockInfo:
    """Check that an engine's class can load the block drafter in `head_dir` for the target, and that our worker serves
    it.

    Raises:
        HeadError: for the first thing that no worker can serve; `LeftToEngine` for what the engine's own may.
    """
    head, target = read_head(head_dir), text_config(read_target_config(target_dir))
    folder, config, options = head.folder, head.config, options_of(head.config)
    if not is_block_drafter(head.written):
        raise HeadError(
            f"{folder} has architectures {head.written.get('architectures')}, which is no block drafter, but "
            f"{engine.chosen}; eagle-plugin check names the flags of this head"
        )
    _refuse_other_kinds(head, options, engine)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        read_size(config, key, folder / "config.json")
    vocabulary, hidden = target["vocab_size"], config["hidden_size"]
    wide = config.get("target_hidden_size") or hidden
    for key, found, wanted in (
        ("vocab_size", config["vocab_size"], vocabulary),
        ("target_hidden_size" if "target_hidden_size" in config else "hidden_size", wide, target["hidden_size"]),
    ):
        if found != wanted:
            raise HeadError(
                f"{folder} has {key} {found}, but the target's is {wanted}; use the drafter that was trained for this "
                "target"
            )
    token = options.get("mask_token_id", config.get("mask_token_id"))
    if type(token) is not int:
        raise HeadError(f"{folder} has mask_token_id {token!r}, wanted a whole number in dflash_config")
    check_mask_token(token, vocabulary, f"{folder} has mask_token_id")
    layers = _target_layers(options, target["num_hidden_layers"], folder)
    if not engine.reads_tables:
        _refuse_other_widths(wide, hidden, layers, target["num_hidden_layers"], folder)
    block = config.get("block_size", options.get("block_size"))
    if block is not None and (type(block) is not int or block < 2):
        raise HeadError(
            f"{folder} has block_size {block!r}, wanted a whole number from 2 on: the root and the drafted tokens"
        )
    if head.num_layers != config["num_hidden_layers"]:
        raise HeadError(
            f"{folder} has num_hidden_layers {config['num_hidden_layers']} in config.json and the weights of "
            f"{head.num_layers} layer(s); copy the config.json of the drafter"
        )
    tensors = head.by_parameter()
    wanted_tensors = dict(_wanted(config, len(layers) * wide))
    size = draft_vocabulary(head, tensors, vocabulary) if engine.reads_tables else vocabulary
    if engine.reads_tables and "lm_head.weight" in tensors:
        wanted_tensors["lm_head.weight"] = size, hidden
    check_shapes(wanted_tensors, tensors, folder)
    _refuse_unknown(tensors, wanted_tensors, folder)
    check_values(head)
    used = [tensors[name] for name in wanted_tensors]
    sizes = size_of(used)._asdict()
    return BlockInfo(hidden, vocabulary, size, layers, head.num_layers, block, is_causal(config), token, **sizes)


def block_warnings(head_dir: str | Path, draft_tokens: int, engine: Engine = VLLM) -> list[str]:
    """Sentences for the log about a drafter that will be served with so many drafted tokens per round."""
    head, warnings = read_head(head_dir), []
    rows, own = block_rows(head.config), 1 - engine.counted
    if rows is not None and rows > draft_tokens + 1:
        warnings.append(
            f"{head_dir} has block_size {rows}, and {engine.tokens} {draft_tokens + own} makes blocks of "
            f"{draft_tokens + 1} tokens, as in {engine.name} itself; the drafts are those that it was trained for from "
            f"{engine.tokens} {rows - engine.counted} on"
        )
    unread = [] if engine.reads_tables else [name for name in _TABLES if name in head.by_parameter()]
    if unread:
        warnings.append(
            f"{head_dir} has {', '.join(unread)}, which {engine.name}'s class does not read: it has the embedding and "
            "the output layer of the target, with which the drafter may have been trained or not"
        )
    return warnings


def _refuse_other_widths(wide: int, hidden: int, layers: tuple[int, ...], count: int, folder: Path) -> None:
    """Raise LeftToEngine for states of the target that SGLang's class, or its targets, do not give."""
    if wide != hidden:
        raise LeftToEngine(
            f"{folder} has hidden_size {hidden}, wanted the target's, {wide}: SGLang's class has one for both"
        )
    if layers[-1] == count - 1:
        raise LeftToEngine(
            f"{folder} has target_layer_ids with {count - 1}, the target's last layer, whose output most of SGLang's "
            "targets do not keep"
        )


def _refuse_other_kinds(head: HeadDescription, options: dict[str, Any], engine: Engine) -> None:
    """Raise LeftToEngine for drafters, or parts of them, that the engine's own worker may serve and ours does not."""
    config, folder = head.config, head.folder
    kind, names = head.written.get("speculators_model_type"), head.written.get("architectures")
    if kind == "dflash" and not engine.reads_speculators:
        raise LeftToEngine(f"{folder} has speculators_model_type {kind}, which {engine.name} does not read")
    if kind not in (None, "dflash") or kind is None and names != [ARCHITECTURE]:
        raise LeftToEngine(
            f"{folder} has {f'speculators_model_type {kind}' if kind else f'architectures {names}'}: of the block "
            f"drafters only {ARCHITECTURE} is served with trees yet"
        )
    count = config.get("num_hidden_layers") or 0
    kinds = config.get("layer_types") or []
    reasons = (
        (bool(head.quantised), "quantised weights: only plain ones are served"),
        (
            options.get("use_swa") or SLIDING in kinds[:count],
            "layers with sliding windows: they are not served in block drafters yet",
        ),
        (
            options.get("use_aux_hidden_state", config.get("use_aux_hidden_state", True)) is False,
            "use_aux_hidden_state false: drafters that read the last hidden state are not served",
        ),
        (options.get("sample_from_anchor"), "sample_from_anchor true: it is not served yet"),
        (options.get("attention_sink_bias") or config.get("add_swa_attention_sink_bias"), "attention sinks: not yet"),
        *(
            (not engine.reads_tables and options.get(key), f"{key} in dflash_config: only plain drafters are served")
            for key in ("projector_type", "conv_kernel_size", "selector_rank", "shift_label")
        ),
        (
            (folder / "mask_embedding.pt").is_file(),
            "mask_embedding.pt: a pickled file is never loaded by the plugin",
        ),
    )
    for holds, why in reasons:
        if holds:
            raise LeftToEngine(f"{folder} has {why}")


def _target_layers(options: dict[str, Any], count: int, folder: Path) -> tuple[int, ...]:
    """The layers whose output the drafter reads."""
    ids = options.get("target_layer_ids")
    if (
        not isinstance(ids, list)
        or not ids
        or any(type(i) is not int or not 0 <= i < count for i in ids)
        or sorted(set(ids)) != ids
    ):
        raise HeadError(
            f"{folder} has target_layer_ids {ids!r}, wanted ascending ids from 0 to {count - 1} in dflash_config for a "
            f"target with {count} layers; use the drafter that was trained for this target"
        )
    return tuple(ids)


def _wanted(config: dict[str, Any], width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that an engine's class would otherwise leave at random values; width: of what fc reads."""
    hidden, inner, heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, (config.get("num_key_value_heads") or heads) * dim
    yield from (("fc.weight", (hidden, width)), ("hidden_norm.weight", (hidden,)), ("norm.weight", (hidden,)))
    for i in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, shape in shapes.items():
            yield f"{_LAYER.format(i)}{name}.weight", shape
        if config.get("attention_bias"):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{_LAYER.format(i)}self_attn.{name}.bias", shapes[f"self_attn.{name}"][:1]


def _refuse_unknown(tensors: dict[str, StoredTensor], wanted: dict[str, Any], folder: Path) -> None:
    unknown = sorted(tensors.keys() - wanted.keys() - set(_TABLES))
    if unknown:
        raise LeftToEngine(
            f"{folder} has {', '.join(unknown[:3])}, which a DFlash drafter does not have: only plain ones are served"
        )
