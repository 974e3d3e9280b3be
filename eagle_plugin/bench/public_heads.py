"""The head of a public model, in a form that the engine reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from eagle_plugin.bench.servers import ServerError
from eagle_plugin.common.cache_folder import cache_folder
from eagle_plugin.heads.files import read_config
from eagle_plugin.models import PublicModel, fetch_repository


def check_public_head(model: PublicModel, engine: str) -> None:
    """Download the head alone, and refuse one that the engine cannot compute before its large target is downloaded.

    Raises:
        ModelError: it could not be fetched. HeadError: its config.json cannot be read. ServerError: the engine cannot
            compute it.
    """
    if engine != "sglang" or not model.rewritten:
        return
    config = read_config(fetch_repository(model.head))
    # True is the default of speculators' EAGLE-3 heads, and of no other kind.
    if config.get("norm_before_residual", config.get("speculators_model_type") == "eagle3"):
        raise ServerError(
            f"the head {model.head} cannot be served by SGLang: its config.json has norm_before_residual true, which "
            "only vLLM computes; serve it with --engine vllm, or give another head with --head"
        )


def public_head(model: PublicModel, engine: str, target: Path) -> Path:
    """The head's folder, downloaded, and for SGLang written again where it does not read it as it is.

    Raises:
        ModelError: it could not be fetched. ServerError: it could not be written again.
    """
    head = fetch_repository(model.head)
    if engine != "sglang" or not model.rewritten:
        return head
    written = cache_folder() / "heads" / model.name
    if not written.is_dir():  # it is complete or not there at all
        written.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "eagle_plugin.cli", "export", str(head), str(written), "--target", str(target)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), done.stderr[-300:])
            raise ServerError(f"the head {model.head} cannot be served by SGLang: {reason.removeprefix('error: ')}")
    return written
