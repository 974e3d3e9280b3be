"""How heads are stored for the engines: the tensors and keys of config.json that each engine class for heads reads.

The rules are those of the loaders `LlamaForCausalLMEagle` and `LlamaForCausalLMEagle3` of SGLang. torch is not
imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any

from eagle_plugin.heads.aux_layers import captured_layers
from eagle_plugin.heads.block_config import ALGORITHM, ARCHITECTURE, MARKOV_ALGORITHM, MARKOV_ARCHITECTURE
from eagle_plugin.heads.draft_vocabulary import check_draft_vocabulary
from eagle_plugin.heads.files import (
    MASK_KEYS,
    Algorithm,
    HeadError,
    Judge,
    StoredTensor,
    canonical_name,
    check_mask_token,
    read_mask_token,
    text_config,
)

Shapes = Iterator[tuple[str, tuple[int, ...]]]  # canonical name and shape of each tensor


class EagleFormat:
    """fc reads the embedding beside the target's last hidden state; embedding and lm_head are the target's."""

    loader = "LlamaForCausalLMEagle"  # SGLang's class, as config.json names it
    algorithm: Algorithm = "EAGLE"
    reads_aux_layers = False  # whether a head reads the input of middle layers of its target

    def canonical_name(self, name: str) -> str:
        """The parameter in which the engine's loader puts the stored tensor `name`."""
        return name

    def hidden_size_key(self, config: dict[str, Any]) -> str:
        """The key that must equal the target's hidden_size."""
        return "hidden_size"

    def check_config(self, config: dict[str, Any], folder: Path, misread: Judge) -> None:
        """Raise HeadError for keys that the loader does not serve; misread: gets those that it ignores."""
        if config.get("tie_word_embeddings"):
            raise HeadError(
                f"{folder} has tie_word_embeddings true, with which the engine cannot share the target's lm_head; "
                "set it to false in the head's config.json"
            )

    def find_aux_layers(
        self, target: dict[str, Any], config: dict[str, Any], folder: Path, misread: Judge
    ) -> tuple[int, ...]:
        """The layers of the target whose input the engine captures; target: its whole config.json.

        Raises:
            HeadError: they are not layers of the target.
        """
        return ()

    def check_vocabulary(
        self,
        target: dict[str, Any],
        config: dict[str, Any],
        folder: Path,
        tensors: dict[str, StoredTensor],
        misread: Judge,
    ) -> int:
        """The size of the vocabulary that the head drafts from; target: the keys of its language model.

        Raises:
            HeadError: config.json and the tables of the draft vocabulary contradict each other.
        """
        size: int = target["vocab_size"]
        return size

    def wanted_tensors(self, config: dict[str, Any], draft_vocab: int, aux: int) -> Shapes:
        """Yield every tensor that the engine would otherwise leave at random values.

        config must hold head_dim and num_key_value_heads; aux is the number of captured layers.
        """
        hidden = config["hidden_size"]
        biased = _ATTENTION if config.get("bias") or config.get("attention_bias") else ()
        yield "fc.weight", (hidden, 2 * hidden)
        yield "fc.bias", (hidden,)  # the engine's layer always has one
        for i in range(config["num_hidden_layers"]):
            yield from _layer_tensors(config, i, hidden, biased, ("input_layernorm",) if i else ())

    def known_tensors(self, config: dict[str, Any]) -> Iterator[str]:
        """Yield the names that a head may have beyond `wanted_tensors` and that are rightly not loaded from it."""
        yield "embed_tokens.weight"  # both are the target's
        yield "lm_head.weight"

    def check_tensors(
        self, config: dict[str, Any], tensors: dict[str, StoredTensor], folder: Path, misread: Judge
    ) -> None:
        """Raise HeadError for what contradicts config.json; misread: gets what the engine would ignore."""


class Eagle3Format(EagleFormat):
    """fc reads the aux hidden states; the first layer reads the embedding; the head has a draft vocabulary."""

    loader = "LlamaForCausalLMEagle3"
    algorithm: Algorithm = "EAGLE3"
    reads_aux_layers = True

    def canonical_name(self, name: str) -> str:
        return canonical_name(name)

    def hidden_size_key(self, config: dict[str, Any]) -> str:
        return "target_hidden_size" if "target_hidden_size" in config else "hidden_size"

    def check_config(self, config: dict[str, Any], folder: Path, misread: Judge) -> None:
        # `check_vocabulary` checks a tied lm_head.
        if config.get("norm_before_residual"):
            misread(
                f"{folder} has norm_before_residual true, which SGLang's EAGLE-3 layer does not read, wanted false; "
                "use or train a head without it, or serve it with vLLM"
            )

    def find_aux_layers(
        self, target: dict[str, Any], config: dict[str, Any], folder: Path, misread: Judge
    ) -> tuple[int, ...]:
        architecture = (target.get("architectures") or ["?"])[0]
        return captured_layers(architecture, text_config(target)["num_hidden_layers"], config, folder, misread)

    def check_vocabulary(
        self,
        target: dict[str, Any],
        config: dict[str, Any],
        folder: Path,
        tensors: dict[str, StoredTensor],
        misread: Judge,
    ) -> int:
        return check_draft_vocabulary(target, config, folder, tensors, misread)

    def wanted_tensors(self, config: dict[str, Any], draft_vocab: int, aux: int) -> Shapes:
        """As in the base class. aux 0: no fc, the head is given the last hidden state."""
        hidden = config["hidden_size"]
        target_hidden = config.get("target_hidden_size") or hidden
        if aux:
            yield "fc.weight", (hidden, aux * target_hidden)
            if config.get("bias"):
                yield "fc.bias", (hidden,)
            eagle = config.get("eagle_config") or {}
            if eagle.get("norm_before_fc", config.get("norm_before_fc", False)):
                yield "input_norm.weight", (aux * target_hidden,)
            if config.get("fc_norm") or config.get("use_aux_norm"):
                for i in range(aux):
                    yield f"fc_norm.{i}.weight", (target_hidden,)
        biased = ("o_proj",) if config.get("bias") or config.get("attention_bias") else ()
        for i in range(config["num_hidden_layers"]):
            norms = ("hidden_norm",) if i else ("hidden_norm", "input_layernorm")
            yield from _layer_tensors(config, i, hidden if i else 2 * hidden, biased, norms)
        yield "norm.weight", (hidden,)
        if config.get("draft_vocab_size") is not None and not config.get("tie_word_embeddings"):
            yield "lm_head.weight", (draft_vocab, hidden)
        if target_hidden != hidden:  # otherwise the target's is shared
            yield "embed_tokens.weight", (config["vocab_size"], hidden)

    def known_tensors(self, config: dict[str, Any]) -> Iterator[str]:
        yield from ("embed_tokens.weight", "d2t", "t2d")
        for i in range(1, config["num_hidden_layers"]):
            yield f"layers.{i}.input_layernorm.weight"  # vLLM's name of hidden_norm

    def check_tensors(
        self, config: dict[str, Any], tensors: dict[str, StoredTensor], folder: Path, misread: Judge
    ) -> None:
        dropped = [name for name in tensors if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))]
        if dropped:
            misread(
                f"{folder} has {dropped[0]}, which the engine's EAGLE-3 layer drops without a message; "
                "train the head without attention biases"
            )
        fc = tensors.get("fc.weight")
        if fc is not None and fc.shape[1:] == (config["hidden_size"],):
            misread(
                f"{folder} has fc.weight that reads {fc.shape[1]} values, as many as the head is wide, and SGLang's "
                "class leaves fc out where states have that width; train a head with more aux layers, or serve it "
                "with vLLM"
            )
        refuse_mask_without_features(config, tensors, folder)


def refuse_mask_without_features(config: dict[str, Any], tensors: Collection[str], folder: Path) -> None:
    """Raise HeadError where config.json is that of a P-EAGLE head and the tensors, by canonical name, are not."""
    claim = next((key for key in (*MASK_KEYS, "parallel_drafting") if config.get(key) not in (None, False)), None)
    if claim is not None and "mask_hidden" not in tensors:
        raise HeadError(
            f"{folder} has {claim} {config[claim]} in config.json and no tensor mask_hidden, wanted both for a "
            "P-EAGLE head and neither for an EAGLE-3 head; export the head again, or remove the key"
        )


class PEagleFormat(Eagle3Format):
    """What P-EAGLE adds to EAGLE-3: the features and the token of a masked row."""

    def known_tensors(self, config: dict[str, Any]) -> Iterator[str]:
        yield from super().known_tensors(config)
        yield "mask_hidden"

    def check_tensors(
        self, config: dict[str, Any], tensors: dict[str, StoredTensor], folder: Path, misread: Judge
    ) -> None:
        super().check_tensors(config, tensors, folder, misread)
        mask, width = tensors["mask_hidden"], tensors["fc.weight"].shape[1]
        if prod(mask.shape) != width:
            raise HeadError(
                f"{folder} has mask_hidden of shape {list(mask.shape)}, wanted [1, {width}] as fc reads; "
                "export the head again"
            )
        token = read_mask_token(config, folder)
        check_mask_token(token, config["vocab_size"], f"{folder} has mask_hidden and mask_token_id")


class BlockFormat(EagleFormat):
    """Block drafters (DFlash); `heads.block_drafter` has the tensors and keys that the engines read of them."""

    loader = ARCHITECTURE
    algorithm: Algorithm = ALGORITHM
    reads_aux_layers = True

    def canonical_name(self, name: str) -> str:
        return canonical_name(name)

    def known_tensors(self, config: dict[str, Any]) -> Iterator[str]:
        yield from ("embed_tokens.weight", "d2t", "t2d")


class MarkovFormat(BlockFormat):
    """The same with a Markov head (DSpark)."""

    loader = MARKOV_ARCHITECTURE
    algorithm: Algorithm = MARKOV_ALGORITHM


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _layer_tensors(
    config: dict[str, Any], i: int, width: int, biased: Collection[str], norms: Collection[str]
) -> Shapes:
    """The tensors of decoder layer i, whose q, k and v read rows of `width`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layer = f"layers.{i}"
    for name, shape in zip(_ATTENTION, ((q, width), (kv, width), (kv, width), (hidden, q)), strict=True):
        yield f"{layer}.self_attn.{name}.weight", shape
        if name in biased:
            yield f"{layer}.self_attn.{name}.bias", shape[:1]
    yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
    yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
    yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    for norm in norms:
        yield f"{layer}.{norm}.weight", (hidden,)
