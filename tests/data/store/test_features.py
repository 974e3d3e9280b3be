"""The hidden states of the hooks are those that transformers itself returns, for many architectures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import VOCAB
from multimodal_models import KINDS as MULTIMODAL
from multimodal_models import multimodal_target
from tiny_targets import ARCHITECTURES, BASE, tiny_target, write_target
from torch import Tensor, nn

from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.store.features import (
    Readout,
    Taps,
    check_aux_layers,
    default_aux_layers,
    find_layers,
    load_target,
)

AUX = (2, 4, 5)


def random_ids(b: int, n: int) -> Tensor:
    return torch.randint(3, BASE["vocab_size"], (b, n), generator=torch.Generator().manual_seed(b * n))


def reference(model: Any, ids: Tensor, layers: tuple[int, ...] = AUX) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[i] for i in layers], -1), output.hidden_states[-1], output.logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_and_logits_are_the_models_own(architecture: str) -> None:
    model, ids = tiny_target(architecture), random_ids(2, 12)
    aux, last, logits = reference(model, ids)
    with Taps(model, AUX) as taps:
        found_aux, found_last = taps.run(ids, [12, 12])
        assert found_aux is not None
        assert torch.equal(found_aux, aux)
        assert torch.equal(found_last, last)
        assert torch.equal(taps.readout(found_last), logits)
    # control: ids shifted by one, SGLang's convention, are other states
    shifted, _, _ = reference(model, ids, tuple(i - 1 for i in AUX))
    assert (found_aux - shifted).abs().mean() > 0.1


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3_next", "llama4_text", "qwen3_moe"])
def test_padding_and_neighbours_change_nothing(architecture: str) -> None:
    rows, lengths = random_ids(3, 20), [20, 7, 13]
    limit = 1e-4 if architecture == "qwen3_next" else 1e-5  # its linear attention sums over chunks: 1.7e-5 with AVX2
    with Taps(tiny_target(architecture), AUX) as taps:
        aux, last = taps.run(rows, lengths)
        assert aux is not None
        for row, n in enumerate(lengths):
            alone_aux, alone_last = taps.run(rows[row : row + 1, :n], [n])
            assert alone_aux is not None
            torch.testing.assert_close(aux[row, :n], alone_aux[0], atol=limit, rtol=limit)
            torch.testing.assert_close(last[row, :n], alone_last[0], atol=limit, rtol=limit)
            assert not aux[row, n:].any() and not last[row, n:].any()
        # control: two rows packed into one are not the same
        packed, _ = taps.run(torch.cat([rows[0], rows[1]])[None], [40])
        assert packed is not None
        assert (packed[0, 20:27] - aux[1, :7]).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "qwen3_next"])
def test_last_is_after_a_norm_that_scales_by_one_plus_weight(architecture: str) -> None:
    model, ids = tiny_target(architecture), random_ids(1, 9)
    with Taps(model, ()) as taps:
        aux, last = taps.run(ids, [9])
    assert aux is None
    entering: list[Tensor] = []
    norm = taps.decoder.norm
    handle = norm.register_forward_pre_hook(lambda module, arguments: entering.append(arguments[0]))
    reference(model, ids)
    handle.remove()
    normed = entering[0] * torch.rsqrt(entering[0].pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(last, normed * (1 + norm.weight))
    assert not torch.allclose(last, normed * norm.weight, atol=0.1)


def test_a_multimodal_wrapper_gives_its_text_model() -> None:
    from transformers import AutoModelForCausalLM, Gemma3Config

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**BASE, "sliding_window": 6}, vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    model, ids = AutoModelForCausalLM.from_config(config).eval(), random_ids(1, 9)
    aux, last, _ = reference(model, ids)
    with Taps(model, AUX) as taps:
        found_aux, found_last = taps.run(ids, [9])
    assert found_aux is not None
    assert torch.equal(found_aux, aux) and torch.equal(found_last, last)


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_multimodal_checkpoints_are_read(kind: str, tmp_path: Path) -> None:
    """With and without a class of transformers for their text alone."""
    model = load_target(multimodal_target(tmp_path, kind), torch.float32)
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    aux, last, _ = reference(model, ids)
    with Taps(model, AUX) as taps:
        found, found_last = taps.run(ids, [12, 12])
    assert found is not None and torch.equal(found, aux)
    assert torch.allclose(found_last, last, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"softcap": 3.0}, {"softcap": None}, {"factor": 0.5}])
def test_a_readout_that_is_not_the_models_is_refused(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("gemma2")
    right = Readout.of(model)
    monkeypatch.setattr(Readout, "of", lambda _: dataclasses.replace(right, **wrong))
    with pytest.raises(DataError, match="computes its logits in another way"):
        Taps(model, AUX)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)  # no hook is left
    monkeypatch.setattr(Readout, "of", lambda _: right)
    Taps(model, AUX).close()


def test_bfloat16_is_taken_as_it_is() -> None:
    for architecture in ("llama", "gemma2", "cohere2"):
        model, ids = tiny_target(architecture, dtype=torch.bfloat16), random_ids(2, 12)
        aux, last, _ = reference(model, ids)
        with Taps(model, AUX) as taps:
            found_aux, found_last = taps.run(ids, [12, 12])
        assert found_aux is not None and found_aux.dtype == torch.bfloat16
        assert torch.equal(found_aux, aux) and torch.equal(found_last, last)


def test_a_layer_that_adds_to_its_input_in_place_is_read_before() -> None:
    model, ids = tiny_target(), random_ids(1, 6)
    wanted, _, _ = reference(model, ids)
    layer = model.model.layers[AUX[1]]
    forward = layer.forward

    def in_place(states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        output = forward(states.clone(), *arguments, **keywords)
        states.zero_()
        return output

    layer.forward = in_place
    with Taps(model, AUX) as taps:
        aux, _ = taps.run(ids, [6])
    assert aux is not None and torch.equal(aux, wanted)


def test_a_trainer_may_differentiate_through_what_it_gets() -> None:
    with Taps(tiny_target(), AUX) as taps:
        aux, last = taps.run(random_ids(1, 6), [6])
    assert aux is not None
    fc = nn.Linear(aux.shape[-1], last.shape[-1])
    (fc(aux) * last).sum().backward()
    assert fc.weight.grad is not None and fc.weight.grad.any()


def test_aux_layers_must_be_distinct_ascending_and_there() -> None:
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(7) == (2, 3, 4)
    for shallow in (3, 5, 6):
        with pytest.raises(DataError, match="--aux-layers"):
            default_aux_layers(shallow)
    assert check_aux_layers([0, 3, 7], 8) == (0, 3, 7)
    for wrong in ([2, 2, 5], [5, 2], [-1, 3], [1, 8]):
        with pytest.raises(DataError, match="between 0 and 7"):
            check_aux_layers(wrong, 8)


def test_layers_are_found_beside_experts_or_not_at_all() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Identity() for _ in range(3)])

    class Decoder(nn.Module):
        def __init__(self, towers: int) -> None:
            super().__init__()
            for tower in range(towers):
                setattr(self, f"layers{tower}", nn.ModuleList([Layer() for _ in range(3)]))

    one = Decoder(1)
    assert find_layers(one, 3) is one.layers0
    for decoder, count in ((Decoder(0), 3), (Decoder(2), 3), (one, 4)):
        with pytest.raises(DataError, match="not supported"):
            find_layers(decoder, count)


def test_only_safetensors_of_known_architectures_are_loaded(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", "qwen3")
    model = load_target(folder, torch.float32)
    assert not model.training and model.dtype == torch.float32
    with pytest.raises(DataError, match="config.json"):
        load_target(tmp_path)
    (folder / "config.json").write_text('{"model_type": "of-tomorrow"}')
    with pytest.raises(DataError, match="cannot be loaded"):
        load_target(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="never loaded"):
        load_target(folder)
