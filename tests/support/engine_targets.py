"""Runs heads of several targets in SGLang's classes, in one process of its own.

Usage: engine_targets.py FOLDER...; each holds target/, head/ and inputs.safetensors, and gets outputs.safetensors.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from engine_heads import run, start_engine
from safetensors.torch import load_file, save_file


@torch.no_grad()
def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]]
    start_engine(folders[0] / "target", Path(tempfile.mkdtemp()))
    for folder in folders:
        target, inputs = load_file(folder / "target/model.safetensors"), load_file(folder / "inputs.safetensors")
        target.setdefault("lm_head.weight", target["model.embed_tokens.weight"])  # tied
        algorithm = next(name for name in ("EAGLE", "EAGLE3") if name in inputs)
        results = run(algorithm, folder / "head", target, inputs)
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in results.items()}, folder / "outputs.safetensors"
        )


if __name__ == "__main__":
    main()
