"""From rows to a head in SGLang's class on targets of many architectures: features, training, export, loading."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from server_forks import run_forked
from tiny_targets import write_target
from toy_targets import dflash_head, random_readout
from trained_heads import run
from training_runs import VOCAB, extract_features, recipe, write_recipe, write_rows

from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head
from eagle_plugin.learning.train import command
from eagle_plugin.learning.train.logs import read_log
from eagle_plugin.learning.train.model import make_head, make_objective
from eagle_plugin.learning.train.recipe import parse_recipe

# The kind of head that is trained, by the model_type of transformers; "auto" is what the recipe's default makes.
TARGETS = [
    ("llama", "eagle3"),
    ("llama", "peagle"),
    ("gpt_oss", "auto"),
    ("qwen3_next", "auto"),
    ("gemma3_text", "auto"),
    ("gemma4_text", "auto"),
]
# In the matrix: trained as Llama's, or with a head that is trained for another.
MORE = [("qwen2", "auto"), ("qwen3", "auto"), ("qwen3_moe", "auto"), ("qwen3_next", "eagle3"), ("llama4_text", "auto")]
AUTO = {"qwen3_next": "eagle2", "gemma3_text": "eagle2"}  # those that are not EAGLE-3
ROWS = 9


class Runs:
    """Training runs, made when they are first asked for: FOLDER/KEY/{target,head,logs}."""

    def __init__(self, folder: Path, rows: Path) -> None:
        self.folder, self.rows = folder, rows

    def train(self, model_type: str, kind: str) -> Path:
        folder = self.folder / f"{model_type}-{kind}"
        if not folder.exists():
            target = write_target(folder / "target", model_type, vocab_size=VOCAB)
            layers = "none" if expected_kind(model_type, kind) == "eagle2" else "1,4,6"
            extract_features(self.rows, target, folder / "store", aux_layers=layers)
            self.fit(folder, folder, kind, lr=3e-3)
        return folder

    def fit(self, folder: Path, out: Path, kind: str, lr: float) -> None:
        head = {"kind": kind} | ({"mask_token_id": 2} if kind == "peagle" else {})
        optimiser = {"lr": lr, "warm_up": 0.0}
        keys = {"budget": {"updates": 10}, "optimiser": optimiser, "log_every": 1, "eval_every": 10}
        values = recipe(folder / "target", folder / "store", head=head, **keys)
        assert command.main([str(write_recipe(folder / "recipe.yaml", values)), "--out", str(out)]) == 0


def loss_ratio(out: Path) -> float:
    """The loss of the last three updates over that of the first three."""
    losses = [row["loss"] for row in read_log(out / "logs/train.csv")]
    return sum(losses[-3:]) / sum(losses[:3])


def expected_kind(model_type: str, kind: str) -> str:
    return AUTO.get(model_type, "eagle3") if kind == "auto" else kind


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("targets")
    return Runs(folder, write_rows(folder / "rows.jsonl", 24))


@pytest.mark.parametrize(
    ("model_type", "kind"), [*TARGETS, *(pytest.param(*more, marks=pytest.mark.matrix) for more in MORE)]
)
def test_training(model_type: str, kind: str, runs: Runs) -> None:
    """The loss falls within some updates, and the exported head fits its target."""
    folder, expected = runs.train(model_type, kind), expected_kind(model_type, kind)
    assert loss_ratio(folder) < 0.97
    info = check_head(folder / "target", folder / "head", algorithm="EAGLE" if expected == "eagle2" else "EAGLE3")
    assert info.kind == expected
    assert info.aux_layer_ids == (() if expected == "eagle2" else (1, 4, 6))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
@pytest.mark.parametrize("targets", [TARGETS, pytest.param(MORE, marks=pytest.mark.matrix)], ids=["some", "more"])
def test_equal_to_sglangs_classes(targets: list[tuple[str, str]], runs: Runs) -> None:
    """SGLang's class of the head, on the weights of each target, drafts the same as our module."""
    folders = [runs.train(model_type, kind) for model_type, kind in targets]
    heads = [load_any_head(folder / "head", folder / "target", torch.float32) for folder in folders]
    torch.manual_seed(0)
    inputs = []
    for folder, head in zip(folders, heads, strict=True):
        features = torch.randn(ROWS, 64 * max(1, len(head.aux_layers)))
        inputs.append(
            {"tokens": torch.randint(VOCAB, (ROWS,)), "positions": torch.arange(ROWS), head.spec.algorithm: features}
        )
        save_file(inputs[-1], folder / "inputs.safetensors")
    script, log = Path(__file__).parents[1] / "support/engine_targets.py", runs.folder / "log"
    assert run_forked(script, list(map(str, folders)), log) == 0, log.read_text()[-3000:]
    wrong = []
    for folder, head, given in zip(folders, heads, inputs, strict=True):
        found = load_file(folder / "outputs.safetensors")
        state, logits = run(head, given["tokens"], given[head.spec.algorithm], given["positions"])
        for name, ours in (("state", state), ("logits", logits)):
            if not torch.allclose(found[name], ours, rtol=1e-4, atol=1e-4):
                wrong.append((folder.name, name, float((found[name] - ours).abs().max())))
    assert not wrong


def test_a_loss_that_stays_is_noticed(runs: Runs) -> None:
    """Control: with almost no learning rate the loss does not fall."""
    folder = runs.train("llama", "eagle3")
    runs.fit(folder, folder / "still", "eagle3", lr=1e-9)
    assert loss_ratio(folder / "still") > 0.97


def test_no_block_drafter_of_gemma_4(tmp_path: Path) -> None:
    """New or trained further: the engines give it different embeddings."""
    target = write_target(tmp_path / "target", "gemma4_text")
    values = recipe(target, tmp_path / "store", head={"kind": "dflash"})
    settings = parse_recipe(values, "recipe")
    with pytest.raises(HeadError, match="model_type gemma4_text, for which no block drafter is trained"):
        make_head(settings, (1, 2, 3))
    with pytest.raises(HeadError, match="train an EAGLE-3 head"):
        make_objective(settings, dflash_head(), random_readout(0, 16, 40), torch.device("cpu"))
