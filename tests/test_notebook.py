"""The notebook of the documents: committed without outputs, and run from its first cell to its last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from document_commands import ROOT
from safetensors.torch import load_file

NOTEBOOK = ROOT / "docs/notebooks/first_head.ipynb"
BASE = ROOT / "examples/heads/smollm2-135m-instruct-eagle3/model.safetensors"


def test_no_outputs_are_stored_and_every_cell_can_be_compiled() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        compile("".join(cell["source"]), cell["id"], "exec")
    assert len(cells) > 5


@pytest.mark.server
@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_the_notebook_trains_and_serves_a_head_and_draws_two_pictures(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert float(printed.rpartition("accept length: ")[2]) > 1.2, printed
    job = tmp_path / "out/jobs/first-head"
    trained, base = load_file(job / "head/model.safetensors"), load_file(BASE)
    assert trained.keys() == base.keys() and any(not trained[name].equal(base[name]) for name in base)
    assert len(json.loads((job / "accept-details.json").read_text())) == 2
