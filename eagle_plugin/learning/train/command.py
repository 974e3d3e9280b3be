"""`eagle-plugin train`: train a draft head by a recipe; the same command continues a run that was stopped."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table

from eagle_plugin.common.allocator import reuse_memory
from eagle_plugin.common.atomic_io import remove_leftovers
from eagle_plugin.common.command_end import end_of
from eagle_plugin.common.command_line import Parser
from eagle_plugin.common.device_memory import naming_lack
from eagle_plugin.common.devices import fast_dtype, usable_cores
from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.export import save_head
from eagle_plugin.heads.manifest import read_manifest
from eagle_plugin.learning.data.provenance import add_terms_options, check_terms, license_of
from eagle_plugin.learning.train.checkpoint import remove_run, saved_update
from eagle_plugin.learning.train.curve import draw_curve, write_curve
from eagle_plugin.learning.train.distributed import Ranks, join_ranks
from eagle_plugin.learning.train.document_order import forward_limit
from eagle_plugin.learning.train.loop import RunResult, Trainer
from eagle_plugin.learning.train.model import DTYPES, check_features, make_head, make_objective, take_parameters
from eagle_plugin.learning.train.progress import Bar
from eagle_plugin.learning.train.recipe import TrainError, TrainRecipe, read_recipe
from eagle_plugin.learning.train.sources import Source, digest_items, open_source
from eagle_plugin.models import head_folder, target_folder

EXAMPLES = """\
examples:
  eagle-plugin train recipe.yaml --out out/head
  eagle-plugin train recipe.yaml --out out/try --set budget.minutes=5 --set optimiser.lr=3e-3
  eagle-plugin train recipe.yaml --out out/head          the same command continues after Ctrl-C or a kill
  torchrun --nproc-per-node 8 -m eagle_plugin.learning.train.command recipe.yaml --out out/head

the smallest recipe:
  target: models/llama
  data: {store: out/features}
  budget: {epochs: 3}

OUT/head is the trained head for SGLang and vLLM, OUT/logs has train.csv, val.csv and the learning curve,
OUT/checkpoints the last two checkpoints. All keys of a recipe: docs/training.md
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when the budget is spent, 130 when it was stopped with its state saved."""
    arguments = _parse(argv)
    settings = _find_folders(read_recipe(arguments.recipe, arguments.set))
    out: Path = arguments.out if arguments.out is not None else Path("out") / arguments.recipe.stem
    reuse_memory()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(settings.threads or max(1, usable_cores() // processes))
    with join_ranks(settings.device, settings.parallel) as ranks, _hold(out, ranks):
        if arguments.restart:
            _restart(out, ranks)
        source = open_source(settings.target, settings.data, DTYPES[settings.dtype], ranks)
        try:
            source.terms = check_terms(source.terms, arguments.allow_licenses, arguments.accept_terms)
            limit = forward_limit(settings.micro_tokens, ranks.device.type)
            now = "no limit" if limit is None else f"{limit:,} tokens per forward"
            with naming_lack(
                ranks.device, f"lower micro_tokens (now {now}) or batch_tokens (now {settings.batch_tokens:,})"
            ):
                return train(settings, out, ranks, source)
        except OSError as error:
            if error.filename and not Path(error.filename).is_relative_to(out):
                raise
            raise TrainError(
                f"cannot write {out} ({error.strerror or error}); free space or correct the permissions, then run the "
                "same command again"
            ) from error
        finally:
            source.close()


def train(settings: TrainRecipe, out: Path, ranks: Ranks, source: Source) -> int:
    """Train, export the head and print the summary; returns the command's exit code.

    Raises:
        UserError: the recipe, the data or what is in the folder do not go together.
    """
    console = Console(stderr=True)
    head = make_head(settings, source.aux_layers)
    check_features(head, source.aux_layers)
    objective = make_objective(settings, head, source.readout(), ranks.device)
    with Bar(console, ranks.writes) as bar:
        if settings.optimiser.name == "muon" and fast_dtype(ranks.device) == "float32":
            bar.print(
                "warning: torch's Muon computes in bfloat16, for which this CPU has no instructions: an update can "
                "take 20 times as long; set optimiser.name to adamw, or train on another machine"
            )
        trainer = Trainer(settings, out, ranks, source, objective, bar)
        if trainer.resume():
            bar.print(f"continuing after update {trainer.position.update:,} of {out}{_lost_updates(trainer, out)}")
        elif (out / "logs" / "train.csv").is_file():
            bar.print(f"the run in {out} was stopped before its first checkpoint; training starts from zero")
        outcome = trainer.run()
        if not outcome.finished:
            bar.print(f"stopped after update {outcome.position.update:,}; the same command continues from there")
            return 130
    parameters, _ = trainer.parameters.gather(ranks.writes)
    if ranks.writes:
        # A second instance: with FSDP the first one holds parts of parameters only.
        whole = take_parameters(make_head(settings, source.aux_layers), parameters)
        notes = _notes(settings, outcome, source)
        save_head(whole, out / "head", target_dir=settings.target, manifest=notes)
        draw_curve(out / "logs", f"{head.kind} for {settings.target.name}")
        write_curve(out / "logs")
        Console().print(_summary(settings, out, whole, outcome, source))
    ranks.wait()
    return 0


def _restart(out: Path, ranks: Ranks) -> None:
    """Empty the folder, so that this is a new run."""
    if ranks.writes:
        remove_run(out)
    ranks.wait()


def _lost_updates(trainer: Trainer, out: Path) -> str:
    """A remark if newer checkpoints than the one that is used were written."""
    saved = saved_update(out)
    lost = saved is not None and saved > trainer.position.update
    return f": checkpoints up to update {saved:,} were written and are gone or damaged" if lost else ""


def _find_folders(settings: TrainRecipe) -> TrainRecipe:
    """The recipe with folders in place of the catalogue's names."""
    head = settings.head
    if head.start is not None:
        head = head.model_copy(update={"start": head_folder(head.start)})
    return settings.model_copy(update={"target": target_folder(settings.target), "head": head})


@contextmanager
def _hold(out: Path, ranks: Ranks) -> Iterator[None]:
    """Lock the folder against other runs."""
    if not ranks.writes:
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock", timeout=0)
        lock.acquire()
    except Timeout as error:
        raise TrainError(f"{out} is in use by another training run; wait for it, or choose another --out") from error
    except OSError as error:
        raise TrainError(f"{out} cannot be written ({error.strerror}); choose another folder with --out") from error
    with lock:
        for folder in (out, out / "logs"):
            remove_leftovers(folder)
        yield


def _notes(settings: TrainRecipe, outcome: RunResult, source: Source) -> dict[str, object]:
    """What the head's manifest says of the training: names of files without folders, because folders are private."""
    recipe = settings.model_dump(mode="json", by_alias=True, exclude={"target": True, "data": True})
    recipe["head"] |= {key: Path(recipe["head"][key]).name for key in ("from", "vocabulary") if recipe["head"][key]}
    # What the head that this one continues has learnt from is in this one too.
    before = (read_manifest(settings.head.start) or {}).get("training") if settings.head.start else None
    before = before if isinstance(before, dict) else {}
    earlier = {key: before.get(key) for key in ("earlier_sources", "sources")}
    notes: dict[str, object] = {
        "training": {
            "documents_sha256": digest_items(source.items),
            "target_license": license_of(settings.target),
            "sources": source.count(),
            "earlier_sources": {
                name: terms for found in earlier.values() if isinstance(found, dict) for name, terms in found.items()
            },
            "updates": outcome.position.update,
            "tokens": outcome.position.tokens,
            "epochs": round(outcome.epochs, 4),
            "recipe": recipe,
        }
    }
    if acceptance := outcome.held_out.get("acceptance"):
        notes["acceptance"] = [round(value, 4) for value in acceptance]
    return notes


def _summary(settings: TrainRecipe, out: Path, head: DraftHead, outcome: RunResult, source: Source) -> Table:
    table = Table("", "", title=f"{head.kind} head for {settings.target.name}", show_header=False)
    table.columns[1].overflow = "fold"
    position, trained = outcome.position, sum(p.numel() for p in head.parameters() if p.requires_grad)
    rows = [
        ("head", str(out / "head")),
        ("trained parameters", f"{trained / 1e6:.1f} M"),
        ("draft vocabulary", f"{len(head.d2t):,} tokens"),
        ("updates", f"{position.update:,}"),
        ("tokens", f"{position.tokens:,} ({outcome.epochs:.2f} epochs)"),
        *(
            (f"source {name}", f"{counted['documents']:,} documents, licence {counted['license']}")
            for name, counted in source.count().items()
        ),
        ("time", f"{outcome.seconds / 60:.1f} min, {position.tokens / max(outcome.seconds, 1e-9):,.0f} tokens/s"),
    ]
    if held_out := outcome.held_out:
        rows += [
            ("held-out accuracy by depth", _join(held_out["accuracy"])),
            ("held-out acceptance by depth", _join(held_out["acceptance"])),
            ("held-out alpha by depth (T = 1)", _join(held_out["alpha"])),
            ("target's mass on the draft vocabulary", f"{held_out['mass'][0]:.1%}"),
        ]
    rows.append(("learning curve", str(out / "logs" / "curve.png")))
    for row in rows:
        table.add_row(*row)
    return table


def _join(values: Sequence[float]) -> str:
    return "  ".join("-" if math.isnan(value) else f"{value:.3f}" for value in values)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="eagle-plugin train",
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml", help="what to train, on what, for how long")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: out/RECIPE)")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="train from zero: the checkpoints and logs in DIR are removed, its head is replaced at the end",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    add_terms_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(end_of(main, owns_process=True))
