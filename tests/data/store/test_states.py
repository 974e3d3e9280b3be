"""States in float8: how close they are to what was stored, and that all that reads a store reads them."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from store_documents import MANIFEST, RUN, make_document, write_documents
from training_runs import extract_features, recipe, run_training, write_rows

from eagle_plugin.learning.data import verify
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.feature_store import FeatureStore, FeatureWriter
from eagle_plugin.learning.data.store.manifest import Manifest
from eagle_plugin.learning.data.store.shards import Document, Entry, Layout, decode, encode
from eagle_plugin.learning.data.store.states import from_float8, to_float8

FLOAT8 = dataclasses.replace(MANIFEST, states="float8")


def stored(document: Document, manifest: Manifest) -> Document:
    """The document as a store gives it back."""
    data = encode(document, manifest)
    assert len(data) == Layout.of(manifest, len(document.ids)).size and len(data) % 8 == 0
    return decode(Entry(document.id, document.source, document.split, "", 0, len(document.ids), 0, ""), data, manifest)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3), st.floats(-30, 30), st.integers(0, 99))
def test_values_are_rounded_by_a_sixteenth(n: int, hidden: int, aux: int, power: float, seed: int) -> None:
    """Whatever the size of the states, which is another one in each layer and token."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randn(n, aux + 1, 1, generator=random).exp() * 2.0**power
    states = (torch.randn(n, aux + 1, hidden, generator=random) * sizes).bfloat16()
    states[0, 0] = 0.0
    manifest = dataclasses.replace(FLOAT8, hidden_size=hidden, aux_layers=tuple(range(aux)))
    known = dataclasses.replace(
        make_document(1, manifest),
        ids=torch.arange(n),
        mask=torch.arange(n) > 1,
        aux=states[:, :aux].flatten(1) if aux else None,
        last=states[:, aux],
    )
    found = stored(known, manifest)
    assert torch.equal(found.ids, known.ids) and torch.equal(found.mask, known.mask)
    for ours, theirs in ((found.aux, known.aux), (found.last, known.last)):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert ours.dtype == torch.bfloat16
        rows, wanted = ours.double().view(n, -1, hidden), theirs.double().view(n, -1, hidden)
        largest = wanted.abs().amax(-1, keepdim=True)
        # Half of the last of 3 bits, and what bfloat16 rounds; numbers below the normal ones are whole steps of 2^-9.
        assert bool(((rows - wanted).abs() <= wanted.abs() * (1 / 16 + 1 / 200) + largest / 448 * 2.0**-10).all())
    last = found.last.double()
    assert bool(
        (last.abs().amax(-1) - known.last.double().abs().amax(-1)).abs().le(known.last.abs().amax(-1) / 200).all()
    )


def test_what_is_no_number_stays_none() -> None:
    """It is found by whoever trains on it, as in bfloat16, and does not become a number."""
    states = torch.tensor([[1.0, torch.nan], [2.0, torch.inf]])
    values, scales = to_float8(states, 2)
    assert not from_float8(values, scales).isfinite().all(dim=1).any()


def test_states_are_those_of_a_product_in_float32() -> None:
    """Bit by bit, for every value of float8 and scales of all sizes, also those with no number and none."""
    random = torch.Generator().manual_seed(0)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(500, 2)  # [500, 512]
    powers = torch.randint(-140, 127, (500, 2), generator=random).float()
    scales = torch.rand(500, 2, generator=random) * powers.exp2()
    scales[:3, 0] = torch.tensor([torch.nan, torch.inf, 0.0])
    wanted = (values.float().view(500, 2, 256) * scales[..., None]).to(torch.bfloat16).view(500, 512)
    assert from_float8(values, scales).view(torch.int16).equal(wanted.view(torch.int16))


def test_a_store_has_half_the_bytes_and_is_ordinary_safetensors(tmp_path: Path) -> None:
    wide = dataclasses.replace(FLOAT8, hidden_size=64)
    sizes = {}
    for form in ("bfloat16", "float8"):
        manifest = dataclasses.replace(wide, states=form)
        with FeatureWriter(tmp_path / form, manifest, RUN) as writer:
            write_documents(writer, range(3), 1 << 20)
        sizes[form] = Layout.of(manifest, 1000).size
    assert 0.5 < sizes["float8"] / sizes["bfloat16"] < 0.55
    whole, half = FeatureStore(tmp_path / "bfloat16"), FeatureStore(tmp_path / "float8")
    assert (half.manifest.states, whole.manifest.states) == ("float8", "bfloat16")
    assert "states" not in json.loads((tmp_path / "bfloat16/manifest.json").read_text())
    with safe_open(str(tmp_path / "float8/shard-000-000000.safetensors"), "pt") as file:
        for k, (entry, other) in enumerate(zip(half.entries, whole.entries, strict=True)):
            scales = file.get_tensor(f"{k}.scales")
            read, exact = half.read(entry), whole.read(other)
            assert torch.equal(read.last, from_float8(file.get_tensor(f"{k}.last"), scales[:, -1:]))
            assert torch.equal(read.aux, from_float8(file.get_tensor(f"{k}.aux"), scales[:, :-1]))
            assert not torch.equal(read.last, exact.last)
            torch.testing.assert_close(read.last.float(), exact.last.float(), rtol=0.07, atol=0.01)
    assert verify.main([str(tmp_path / "float8")]) == 0


def test_stores_of_two_forms_are_not_mixed(tmp_path: Path) -> None:
    FeatureWriter(tmp_path, FLOAT8, RUN).close()
    with pytest.raises(DataError, match="states 'float8', not 'bfloat16'.*--store"):
        FeatureWriter(tmp_path, MANIFEST, RUN)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("float8", "float4"))
    with pytest.raises(DataError, match="states in 'float4', wanted bfloat16 or float8; update eagle-plugin"):
        FeatureStore(tmp_path)


def test_a_head_is_trained_on_both(tiny_target: Path, tmp_path: Path) -> None:
    """Its loss is nearly that on bfloat16 states, and not the same."""
    rows = write_rows(tmp_path / "rows.jsonl", 40)
    losses = {}
    for form in ("bfloat16", "float8"):
        store = extract_features(rows, tiny_target, tmp_path / form, states=form)
        out = run_training(tmp_path, f"on-{form}", recipe(tiny_target, store))
        with (out / "logs/val.csv").open() as file:
            losses[form] = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses["float8"]) > 1 and losses["float8"] != losses["bfloat16"]
    assert losses["float8"] == pytest.approx(losses["bfloat16"], rel=0.01)
