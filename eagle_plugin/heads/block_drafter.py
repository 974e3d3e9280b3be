"""Block drafters (DFlash, DSpark): what their files hold, and whether an engine's class computes what our worker asks.

They are other models than EAGLE heads: layers of Qwen3 whose queries are the root token and masks, and whose other keys
and values are made of the target's states. DSpark's Markov head adds a bias by the token before to each level's logits.
`heads.dflash` and `heads.dspark` have the modules. No engine is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from eagle_plugin.heads.block_config import (
    MARKOV,
    METHOD,
    METHODS,
    NOT_CAUSAL,
    block_rows,
    first_row,
    is_block_drafter,
    is_causal,
    kind_of,
    options_of,
)
from eagle_plugin.heads.block_tensors import TABLES, refuse_unknown, tensors_of_layers
from eagle_plugin.heads.checkpoint import check_shapes, check_values, size_of
from eagle_plugin.heads.description import HeadDescription, read_head
from eagle_plugin.heads.files import HeadError, LeftToEngine, check_mask_token, read_size, text_config
from eagle_plugin.heads.other_layouts import SLIDING
from eagle_plugin.heads.suspicions import part_of_rotation
from eagle_plugin.heads.target_config import read_target_config
from eagle_plugin.heads.vllm_rules import draft_vocabulary


class Engine(NamedTuple):
    """What differs between the engines."""

    name: str
    chosen: str  # what of its flags chooses drafters of a kind
    served: str  # with which flag it serves them
    tokens: str  # the flag of the drafted tokens
    counted: int  # of the block's tokens the flag does not count so many
    reads_tables: bool  # whether its class reads an embedding, an output layer and a draft vocabulary of the drafter
    reads_speculators: bool  # whether it reads the config.json of speculators

    def flag(self, kind: str) -> str:
        """With which flag it serves drafters of a kind."""
        return self.served.format(self.name_of(kind))

    def name_of(self, kind: str) -> str:
        """Its own name of a kind."""
        return kind.upper() if self.name == "SGLang" else kind

    def finds_mask(self, kind: str, config: dict[str, Any]) -> bool:
        """Whether it finds the token of the masks elsewhere than under mask_token_id."""
        if self.name == "SGLang":
            return kind == METHOD  # by its text, in the tokenizer
        return any(config.get(key) is not None for key in ("dspark_noise_token_id", "pard_token", "ptd_token_id"))


EMBEDDING = "embed_tokens.weight"
VLLM = Engine(
    name="vLLM",
    chosen="--speculative-config has method {}",
    served='"method": "{}" in --speculative-config',
    tokens="num_speculative_tokens",
    counted=1,
    reads_tables=True,
    reads_speculators=True,
)
SGLANG = Engine(
    name="SGLang",
    chosen="--speculative-algorithm is {}",
    served="--speculative-algorithm {}",
    tokens="--speculative-num-draft-tokens",
    counted=0,
    reads_tables=False,
    reads_speculators=False,
)
ENGINES = (VLLM, SGLANG)


class BlockInfo(NamedTuple):
    """What the checkpoint of a block drafter contains."""

    kind: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layers: tuple[int, ...]  # layers of the target whose OUTPUT it reads, counted from 0
    num_layers: int
    block: int | None  # rows that it was trained with, the root's included; None where config.json does not say
    first: int  # the row that lists the first level
    causal: bool  # whether a row of the block sees only the rows up to its own
    mask_token: int
    dtype: str
    parameters: int
    bytes: int

    @property
    def levels(self) -> int | None:
        """The levels that it was trained to list."""
        return None if self.block is None else self.block - self.first


def describe_block(
    target_dir: str | Path, head_dir: str | Path, engine: Engine = VLLM, asked: str | None = None
) -> BlockInfo:
    """Check that an engine's class can load the block drafter in `head_dir` for the target, and that our worker serves
    it.

    asked: the kind that the engine's flags name; None where they are not known.

    Raises:
        HeadError: for the first thing that no worker can serve; `LeftToEngine` for what the engine's own may.
    """
    head, target = read_head(head_dir), text_config(read_target_config(target_dir))
    folder, config, options = head.folder, head.config, options_of(head.config)
    chosen = engine.chosen.format(engine.name_of(asked or METHOD))
    if not is_block_drafter(head.written):
        raise HeadError(
            f"{folder} has architectures {head.written.get('architectures')}, which is no block drafter, but "
            f"{chosen}; eagle-plugin check names the flags of this head"
        )
    kind = _served_kind(head, options, engine)
    if asked not in (None, kind):
        raise HeadError(f"{folder} is a {kind} drafter, but {chosen}; serve it with {engine.flag(kind)}")
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        read_size(config, key, folder / "config.json")
    if (act := config.get("hidden_act", "silu")) != "silu":
        error = HeadError if engine.reads_tables or act != "swigluoai" else LeftToEngine  # SGLang's class has both
        raise error(f"{folder} has hidden_act {act!r}, wanted silu; use a drafter with a plain silu MLP")
    vocabulary, hidden = target["vocab_size"], config["hidden_size"]
    tensors = head.by_parameter()
    if kind == MARKOV and engine.reads_tables and config["vocab_size"] > vocabulary and EMBEDDING in tensors:
        raise LeftToEngine(
            f"{folder} has vocab_size {config['vocab_size']}, above the target's {vocabulary}, and its own embedding: "
            "only drafters of the target's vocabulary are served"
        )
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
    where = "config.json" if kind == MARKOV else "dflash_config"
    if type(token) is not int:
        error = LeftToEngine if token is None and engine.finds_mask(kind, config) else HeadError
        raise error(f"{folder} has mask_token_id {token!r}, wanted a whole number in {where}")
    check_mask_token(token, vocabulary, f"{folder} has mask_token_id")
    layers = _target_layers(options, target["num_hidden_layers"], folder, where)
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
    wanted_tensors = dict(tensors_of_layers(config, len(layers) * wide))
    size = draft_vocabulary(head, tensors, vocabulary) if engine.reads_tables else vocabulary
    if engine.reads_tables and "lm_head.weight" in tensors:
        wanted_tensors["lm_head.weight"] = size, hidden
    if kind == MARKOV:
        rank = read_size(config, "markov_rank", folder / "config.json")
        wanted_tensors["markov_head.markov_w1.weight"] = vocabulary, rank
        wanted_tensors["markov_head.markov_w2.weight"] = size, rank
    check_shapes(wanted_tensors, tensors, folder)
    refuse_unknown(kind, tensors, wanted_tensors, folder)
    check_values(head)
    used = [tensors[name] for name in wanted_tensors]
    sizes = size_of(used)._asdict()
    first = first_row(head.written)
    return BlockInfo(
        kind, hidden, vocabulary, size, layers, head.num_layers, block, first, is_causal(config), token, **sizes
    )


def block_warnings(head_dir: str | Path, draft_tokens: int, engine: Engine = VLLM) -> list[str]:
    """Sentences for the log about a drafter that will be served with so many drafted tokens per round."""
    head = read_head(head_dir)
    warnings = list(part_of_rotation(head))
    rows, first, own = block_rows(head.config), first_row(head.written), 1 - engine.counted
    if rows is not None and rows - first > draft_tokens:
        warnings.append(
            f"{head_dir} has block_size {rows}, and {engine.tokens} {draft_tokens + own} makes blocks of "
            f"{draft_tokens + first} tokens, as in {engine.name} itself; the drafts are those that it was trained for "
            f"from {engine.tokens} {rows - first + own} on"
        )
    if head.config.get(NOT_CAUSAL) is False and head.config.get("is_causal") is None and is_causal(head.config):
        warnings.append(
            f"{head_dir} has {NOT_CAUSAL} false, with which vLLM lets a row of the block see only the rows before it "
            "in layers without windows too; if these were trained with the whole block, the drafts are poor"
        )
    unread = [] if engine.reads_tables else [name for name in TABLES if name in head.by_parameter()]
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


def _served_kind(head: HeadDescription, options: dict[str, Any], engine: Engine) -> str:
    """The kind of a drafter. Raises LeftToEngine for drafters, or parts of them, that the engine's own worker may serve
    and ours does not."""
    config, folder = head.config, head.folder
    named, names = head.written.get("speculators_model_type"), head.written.get("architectures")
    if named == METHOD and not engine.reads_speculators:
        raise LeftToEngine(f"{folder} has speculators_model_type {named}, which {engine.name} does not read")
    if (kind := kind_of(head.written)) is None:
        raise LeftToEngine(
            f"{folder} has {f'speculators_model_type {named}' if named else f'architectures {names}'}: of the block "
            f"drafters only {' and '.join(METHODS)} are served with trees in {engine.name} yet"
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
        (
            kind == METHOD and options.get("sample_from_anchor"),
            "sample_from_anchor true: it is not served yet in a dflash drafter",
        ),
        (
            kind == MARKOV and config.get("markov_head_type") not in (None, "vanilla"),
            f"markov_head_type {config.get('markov_head_type')}: only vanilla Markov heads are served",
        ),
        (options.get("attention_sink_bias") or config.get("add_swa_attention_sink_bias"), "attention sinks: not yet"),
        *(
            (
                # Of a Markov head this value only repeats the kind.
                not engine.reads_tables and options.get(key) and (kind, options[key]) != (MARKOV, "dspark"),
                f"{key} in dflash_config: only plain drafters are served",
            )
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
    return kind


def _target_layers(options: dict[str, Any], count: int, folder: Path, where: str) -> tuple[int, ...]:
    """The layers whose output the drafter reads."""
    ids = options.get("target_layer_ids")
    if ids is None:
        raise LeftToEngine(
            f"{folder} has no target_layer_ids, wanted them in {where}: engines have defaults of their own"
        )
    if (
        not isinstance(ids, list)
        or not ids
        or any(type(i) is not int or not 0 <= i < count for i in ids)
        or sorted(set(ids)) != ids
    ):
        raise HeadError(
            f"{folder} has target_layer_ids {ids!r}, wanted ascending ids from 0 to {count - 1} in {where} for a "
            f"target with {count} layers; use the drafter that was trained for this target"
        )
    return tuple(ids)
