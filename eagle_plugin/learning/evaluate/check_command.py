"""`eagle-plugin check`: does a draft head fit its target, and are its drafts accepted?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_plugin.common.atomic_io import write_output
from eagle_plugin.common.command_end import importing
from eagle_plugin.common.command_line import Parser, print_table
from eagle_plugin.common.device_memory import device_for, naming_lack
from eagle_plugin.common.devices import check_device
from eagle_plugin.common.progress import progress_bar
from eagle_plugin.heads.block_config import ARCHITECTURES, METHOD, is_block_drafter, kind_of
from eagle_plugin.heads.block_drafter import ENGINES, SGLANG, BlockInfo, Engine, block_warnings, describe_block
from eagle_plugin.heads.checkpoint import HeadInfo, check_head
from eagle_plugin.heads.files import HeadError, LeftToEngine, read_config
from eagle_plugin.heads.kinds import HEADS, stored_algorithm
from eagle_plugin.heads.manifest import compare_target, read_manifest
from eagle_plugin.heads.vllm_rules import describe_head
from eagle_plugin.models import head_folder, target_folder

DESCRIPTION = """\
Compare names, shapes, aux layers, vocabulary tables and digests, then draft a few responses of the target. A head with
tensors of the right shape is refused with the reason if it was trained for another target or its aux layers are wrong.
The engines read some heads differently: without --engine a head is judged by SGLang's rules, and one line says what
vLLM makes of it. Runs without an engine.
"""
# The answers are of 96 tokens, and rotary positions of another base differ little over so few.
NOT_SEEN = "a rope_theta other than in training: drafts of answers as short as these change little"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of what was found; raises UserError for a head that does not fit."""
    arguments = _parse(argv)
    target, head = target_folder(arguments.target), head_folder(arguments.head)
    if (head / "config.json").is_file() and is_block_drafter(read_config(head)):
        _print_block_drafter(target, head, arguments)
        return
    info = _described(target, head, arguments.engine, arguments.algorithm)
    warnings, drafts = list(info.warnings), "not measured (--files-only)"
    measured: dict[str, Any] = {}
    if not arguments.files_only:
        with importing():
            from eagle_plugin.learning.evaluate.check import PROMPTS, check, why_not_measured

        if why := why_not_measured(target, head, info) if arguments.engine == "vllm" else None:
            drafts = f"not measured: {why}"
        else:
            device = _device(arguments, target, head)
            with progress_bar() as progress, naming_lack(device):
                report = check(
                    target,
                    head,
                    info=info,
                    device=device,
                    report=lambda done: progress("answers", done / len(PROMPTS)),
                )
            warnings = report.warnings
            drafts, measured = _drafts(report.served.stats, report.trained)
    layers = ", ".join(map(str, info.aux_layer_ids)) or "none"
    print_table(
        ("head", head),
        ("target", target),
        ("kind", info.kind),
        *_engines(target, head, info, arguments.engine),
        ("architecture", f"{info.architecture}, {info.num_layers} layer(s), hidden size {info.hidden_size}"),
        ("vocabulary", f"{info.draft_vocab_size:,} of {info.vocab_size:,} tokens"),
        ("aux hidden states", f"inputs of target layers {layers}"),
        ("weights", f"{info.parameters / 1e6:.1f} M parameters, {info.dtype}, {info.bytes / 2**20:.1f} MiB"),
        ("drafts", drafts),
        *([("not seen", NOT_SEEN)] if measured else []),
    )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        found = {"kind": info.kind, "aux_layers": info.aux_layer_ids, **measured, "warnings": warnings}
        write_output(arguments.json, [json.dumps(found, indent=1), "\n"], "name another file with --json")


def _print_block_drafter(target: Path, head: Path, arguments: argparse.Namespace) -> None:
    """The table of a block drafter.

    Raises:
        HeadError: no engine that was asked for serves it for this target; `LeftToEngine` where the engine alone may.
    """
    if arguments.algorithm is not None:
        raise HeadError(
            f"{head} is a block drafter, and --algorithm {arguments.algorithm} is for EAGLE heads; SGLang serves it "
            f"with {SGLANG.flag(kind_of(read_config(head)) or METHOD)}"
        )
    asked = [engine for engine in ENGINES if arguments.engine in (None, engine.name.lower())]
    found = [_block_of(target, head, engine) for engine in asked]
    described = [one for one in found if isinstance(one, BlockInfo)]
    if not described:
        raise next(one for one in found if isinstance(one, HeadError))
    info, tokens = described[0], described[0].levels or 0
    warnings = list(dict.fromkeys(line for engine in asked for line in block_warnings(head, tokens, engine)))
    served = [
        (engine.name, engine.flag(one.kind) if isinstance(one, BlockInfo) else str(one))
        for engine, one in zip(asked, found, strict=True)
    ]
    drafted = f"of which {info.levels} are drafted" if info.first else "each of which drafts one"
    block = f"{info.block} tokens, {drafted}" if info.block else "not in config.json"
    if info.causal:
        block += "; a row sees only those before it"
    manifest = read_manifest(head)
    warnings += [] if manifest is None else compare_target(manifest, target, head)
    drafts, measured = _block_drafts(target, head, arguments)
    print_table(
        ("head", head),
        ("target", target),
        ("kind", f"{info.kind} (block drafter)"),
        *served,
        (
            "architecture",
            f"{ARCHITECTURES[info.kind]}, {info.num_layers} layer(s), hidden size {info.hidden_size}",
        ),
        ("block", block),
        ("mask token", info.mask_token),
        ("vocabulary", f"{info.draft_vocab_size:,} of {info.vocab_size:,} tokens"),
        ("aux hidden states", f"outputs of target layers {', '.join(map(str, info.target_layers))}, counted from 0"),
        ("weights", f"{info.parameters / 1e6:.1f} M parameters, {info.dtype}, {info.bytes / 2**20:.1f} MiB"),
        ("drafts", drafts),
    )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        told: dict[str, Any] = {
            "kind": info.kind,
            "target_layers": info.target_layers,
            "block": info.block,
            **measured,
            "warnings": warnings,
        }
        write_output(arguments.json, [json.dumps(told, indent=1), "\n"], "name another file with --json")


def _block_of(target: Path, head: Path, engine: Engine) -> BlockInfo | HeadError:
    try:
        return describe_block(target, head, engine)
    except HeadError as error:
        return error


def _device(arguments: argparse.Namespace, *folders: Path) -> str:
    """Where the target and the head in these folders compute. torch is imported, which --files-only does without."""
    return device_for(folders) if arguments.device is None else check_device(arguments.device)


def _block_drafts(target: Path, head: Path, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """What is known of a block drafter's drafts, for the table and for --json."""
    if arguments.files_only:
        return "not measured (--files-only)", {}
    with importing():
        from eagle_plugin.heads.load import load_any_head
        from eagle_plugin.learning.evaluate.check import PROMPTS, check_block_drafter
    try:
        load_any_head(head, target)
    except HeadError as error:
        return f"not measured: {error}", {}
    device = _device(arguments, target, head)
    with progress_bar() as progress, naming_lack(device):
        found = check_block_drafter(target, head, device, lambda done: progress("answers", done / len(PROMPTS)))
        return _drafts(*found)


def _drafts(stats: Any, trained: float | None) -> tuple[str, dict[str, Any]]:
    """The sentence about measured drafts (`AcceptStats`), and the same for --json."""
    drafts = f"first draft right for {stats.cumulative[0]:.1%}, accept length {stats.accept_length:.2f}"
    if trained is not None:
        drafts += f" (in training {trained:.1%})"
    return drafts, stats.to_json() | {"trained_acceptance": trained}


def _described(target: Path, head: Path, engine: str | None, algorithm: str | None) -> HeadInfo:
    """What an engine makes of the head's files.

    Raises:
        HeadError: it does not serve them; where SGLang was not asked for and vLLM does, the sentence says so.
    """
    if engine == "vllm":
        return describe_head(target, head)
    try:
        return check_head(target, head, algorithm=algorithm or stored_algorithm(read_config(head)))
    except HeadError as error:
        if engine is None and _of_vllm(target, head)[0]:
            raise type(error)(f"{error}; vLLM serves it as it is (eagle-plugin check --engine vllm)") from error
        raise


def _engines(target: Path, head: Path, info: HeadInfo, engine: str | None) -> list[tuple[str, str]]:
    """For each engine that was asked for, with which flag it serves the head or why it does not."""
    if engine == "vllm":
        return [("vLLM", f'"method": "{HEADS[info.kind].method}" in --speculative-config')]
    sglang = [("SGLang", f"--speculative-algorithm {info.algorithm}")]
    return sglang if engine == "sglang" else [*sglang, ("vLLM", _of_vllm(target, head)[1])]


def _of_vllm(target: Path, head: Path) -> tuple[bool, str]:
    """Whether the plugin's worker serves the head in vLLM, and with which flag, or why not."""
    try:
        return True, f'"method": "{HEADS[describe_head(target, head).kind].method}" in --speculative-config'
    except LeftToEngine as error:
        return False, f"left to vLLM's own worker: {error}"
    except HeadError as error:
        return False, f"does not start: {error}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="eagle-plugin check", description=DESCRIPTION)
    parser.add_argument("target", metavar="TARGET", help="folder of the target, or a name of `models list`")
    parser.add_argument("head", metavar="HEAD", help="folder of the draft head, or its name in `models list`")
    parser.add_argument(
        "--algorithm",
        choices=("EAGLE", "EAGLE3"),
        help="SGLang's --speculative-algorithm (default: the head's own)",
    )
    parser.add_argument("--engine", choices=("sglang", "vllm"), help="judge the head by this engine's rules alone")
    parser.add_argument(
        "--files-only", action="store_true", help="check the files only; do not run the target and the head"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU with enough free memory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to this file")
    return parser.parse_args(argv)
