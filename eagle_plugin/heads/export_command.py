"""`eagle-plugin export`: rewrite a head of any origin as one that both engines load."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eagle_plugin.common.command_line import Parser, positive_number
from eagle_plugin.heads.block_config import is_block_drafter
from eagle_plugin.heads.block_drafter import SGLANG, describe_block
from eagle_plugin.heads.checkpoint import HeadInfo, check_head
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head, warn_of_biases
from eagle_plugin.heads.files import HeadError, read_config, text_config
from eagle_plugin.heads.interpretations import Interpretation, read_interpretations
from eagle_plugin.heads.kinds import HEADS, find_spec
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.heads.manifest import compare_target, read_manifest
from eagle_plugin.heads.target_config import read_target_config
from eagle_plugin.heads.target_table import are_layers
from eagle_plugin.models import head_folder, target_folder
from eagle_plugin.policy.shapes import CPU_DRAFTS, GPU_SHAPE

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DESCRIPTION = """\
Rewrite a draft head (ours, official EAGLE, SpecForge's or speculators', DFlash, DSpark) as a folder that stock SGLang
and stock vLLM both load: config.json with the aux layers in both engines' keys, model.safetensors, eagle_plugin.json.
"""
EXAMPLES = """\
examples:
  eagle-plugin export ./EAGLE3-LLaMA3.1 out/head --target ./Llama-3.1-8B-Instruct
  eagle-plugin export out/head out/head-fp32 --target ./Llama-3.1-8B-Instruct --dtype float32
  eagle-plugin export ./head out/head --target ./Llama-3.1-8B-Instruct --window 512
  eagle-plugin check ./Llama-3.1-8B-Instruct ./head       which aux layers was this head trained on?
  eagle-plugin export ./head out/head --target ./Llama-3.1-8B-Instruct --aux-layers 2,16,29

A head whose config.json can mean two sets of layers is refused until --aux-layers says which.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0.

    Raises:
        HeadError: the head cannot be read, or does not fit the target.
    """
    arguments = _parser().parse_args(argv)
    head, target = head_folder(arguments.head), target_folder(arguments.target)
    if Path(arguments.out).resolve() == head.resolve():
        raise HeadError(f"{arguments.out} is the head itself; give another folder for the rewritten head")
    manifest = read_manifest(head) or {}
    for warning in compare_target(manifest, target, head) if manifest else []:
        print(f"warning: {warning}", file=sys.stderr)
    if is_block_drafter(read_config(head)):
        return _export_block_drafter(arguments, head, target, manifest)
    aux, norm = arguments.aux_layers, arguments.norm_output
    found = read_interpretations(head, target)
    if aux is not None and not manifest and found[0].aux_layers:
        found = _with_layers(found, aux, head, target)
    interpretation = _choose(found, aux, norm, head)
    loaded = load_any_head(head, target, interpretation=interpretation)
    if arguments.window is not None:
        loaded.set_window(arguments.window)
    _save(arguments, loaded, target, manifest)
    info = check_head(target, arguments.out, algorithm=loaded.spec.algorithm)
    for warning in [*info.warnings, *warn_of_biases(dict(loaded.named_parameters()), arguments.out)]:
        print(f"warning: {warning}", file=sys.stderr)
    Console().print(_summary(info, Path(arguments.out)))
    # Not in the table, where a long command would be wrapped.
    print(f"SGLang: --speculative-algorithm {info.algorithm} --speculative-draft-model-path {arguments.out}")
    vllm = HEADS[info.kind].vllm_config(arguments.out, CPU_DRAFTS)
    print(f"vLLM: --speculative-config '{json.dumps(vllm)}'")
    print(f'      on a GPU "num_speculative_tokens": {GPU_SHAPE.width - 1}')
    return 0


def _save(arguments: argparse.Namespace, loaded: DraftHead, target: Path, manifest: dict[str, Any]) -> None:
    """manifest: of the head as it was read, of which the training and the target's name are kept."""
    notes = {k: v for k, v in manifest.items() if k not in ("format", "kind", "aux_layers", "target")}
    if "name" in manifest.get("target", {}):
        notes["target_name"] = manifest["target"]["name"]
    dtype = DTYPES.get(arguments.dtype) or loaded.fc.weight.dtype
    save_head(loaded, arguments.out, target_dir=target, manifest=notes, dtype=dtype)


def _export_block_drafter(arguments: argparse.Namespace, head: Path, target: Path, manifest: dict[str, Any]) -> int:
    for option in ("aux_layers", "norm_output", "window"):
        if getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise HeadError(f"--{name} is for EAGLE heads, and {head} is a block drafter; leave the option out")
    loaded = load_any_head(head, target)
    _save(arguments, loaded, target, manifest)
    info = describe_block(target, arguments.out)
    print(
        f"{arguments.out}: {info.kind}, {info.num_layers} layer(s), {info.parameters / 1e6:.1f} M parameters, "
        f"{info.dtype}"
    )
    if loaded.own_lm_head is None and not loaded.own_embedding:
        print(f"SGLang: {SGLANG.flag(info.kind)} --speculative-draft-model-path {arguments.out}")
    else:
        print("SGLang: no, its class reads neither an embedding nor an lm_head of a drafter's own")
    vllm = find_spec(info.kind).vllm_config(arguments.out, info.levels or 1)
    print(f"vLLM: --speculative-config '{json.dumps(vllm)}'")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="eagle-plugin export", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("head", metavar="HEAD", help="folder of the head: config.json and *.safetensors")
    parser.add_argument("out", metavar="OUT", help="folder to write; an exported head there is replaced")
    parser.add_argument("--target", required=True, help="the head's target: a folder, or a name of `models list`")
    parser.add_argument(
        "--aux-layers",
        type=_layers,
        metavar="I,J,K",
        help="the target layers whose INPUT the head was trained on, where its config.json does not decide it or is "
        "wrong",
    )
    parser.add_argument(
        "--norm-output",
        choices=("yes", "no"),
        help="whether the next draft step takes the normed state, where config.json does not decide it (SpecForge: no)",
    )
    parser.add_argument(
        "--window",
        type=positive_number,
        metavar="N",
        help="let each row of the head see the last N keys, its own among them: drafts of long contexts may be better, "
        "also of a head that was trained without",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (default: as they are)")
    return parser


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _with_layers(found: list[Interpretation], aux: tuple[int, ...], head: Path, target: Path) -> list[Interpretation]:
    """The interpretations, and these layers where no config.json says them: a head of another project may be wrong."""
    layers = text_config(read_target_config(target))["num_hidden_layers"]
    if any(one.aux_layers == aux for one in found):
        return found
    if not are_layers(aux, layers):
        raise HeadError(
            f"--aux-layers is {','.join(map(str, aux))}, wanted rising ids from 1 to {layers - 1} for a target with "
            f"{layers} layers; `eagle-plugin check` measures which layers {head} was trained on"
        )
    norms = dict.fromkeys(one.norm_output for one in found)
    return [*found, *(Interpretation(aux, norm, "--aux-layers") for norm in norms)]


def _choose(
    found: list[Interpretation], aux: tuple[int, ...] | None, norm: str | None, head: Path
) -> Interpretation | None:
    """The one interpretation that the options leave; None if several are left, which the loader then refuses."""
    left = [
        one for one in found if aux in (None, one.aux_layers) and (norm is None or one.norm_output == (norm == "yes"))
    ]
    if not left:
        options = " or ".join(f"{','.join(map(str, one.aux_layers))} ({one.origin})" for one in found)
        raise HeadError(
            f"{head} cannot mean what --aux-layers and --norm-output say, but {options}; correct the options"
        )
    return left[0] if len(left) == 1 else None


def _summary(info: HeadInfo, out: Path) -> Table:
    table = Table(show_header=False)
    layers = ", ".join(map(str, info.aux_layer_ids)) or "none"
    for row in (
        ("head", str(out)),
        ("kind", f"{info.kind}, {info.num_layers} layer(s)"),
        ("vocabulary", f"{info.draft_vocab_size:,} of {info.vocab_size:,} tokens"),
        ("aux hidden states", f"inputs of target layers {layers}"),
        ("weights", f"{info.parameters / 1e6:.1f} M parameters, {info.dtype}, {info.bytes / 2**20:.1f} MiB"),
    ):
        table.add_row(*row)
    return table
