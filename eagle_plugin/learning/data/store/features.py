"""Hidden states of any transformers model: the inputs of its aux layers, and the input of its lm_head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from eagle_plugin.collect.readout import readout_scale
from eagle_plugin.common.device_memory import naming_lack
from eagle_plugin.common.devices import DeviceError
from eagle_plugin.common.errors import first_line
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.target_files import read_target_json

PROBE_TOKENS = 8
BY_ENGINE = "or let an engine compute the states to train on: `data features --endpoint`, `data collect`"
# Largest difference from the model's own logits, relative to the largest logit. Sums in another order differ this much.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def load_target(folder: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> Any:
    """Load the language model in a folder, also one inside a multimodal class, for evaluation.

    No code that comes with it is run.

    Raises:
        DataError: the folder holds no safetensors checkpoint of an architecture that transformers knows, or its weights
            are quantised in a format that cannot be read here.
        DeviceError: they do not fit into the memory of a GPU.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # the commands draw their own
    folder = Path(folder)
    written = read_target_json(folder / "config.json")  # its errors name the file, those of transformers guess
    method = _quantisation(folder, written)
    if not any(folder.glob("*.safetensors")):
        raise DataError(f"{folder} has no *.safetensors; convert the weights first (pickled files are never loaded)")
    try:
        safely = {"trust_remote_code": False, "local_files_only": True}
        config = AutoConfig.from_pretrained(folder, **safely)
        read = partial(auto_class(config).from_pretrained, config=config, dtype=dtype, use_safetensors=True, **safely)
        with naming_lack(device):
            model = read(folder, **_placement(device)).eval()
            # What is placed already is not moved: some quantised models refuse it.
            return model if model.device == _indexed(device) else model.to(device)
    except DeviceError as error:
        raise DeviceError(f"{error}, {BY_ENGINE}") from error
    except Exception as error:  # safetensors and tokenizers have errors of their own
        reason = first_line(error)
        fix = "give a causal language model"
        if method:
            fix = f"install what it asks for to read {method} weights, {BY_ENGINE}"
        raise DataError(f"{folder} cannot be loaded by transformers ({reason}); {fix}") from error


def _placement(device: str | torch.device) -> dict[str, Any]:
    """What lets transformers read each weight onto the GPU at once, without a copy of the model in the CPU's memory."""
    from transformers.utils import is_accelerate_available

    on_gpu = torch.device(device).type == "cuda" and is_accelerate_available()
    return {"device_map": {"": _indexed(device)}} if on_gpu else {}


def _indexed(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def auto_class(config: Any) -> Any:
    """The class of transformers that makes the model of a config.

    Some multimodal targets have a class for text alone, which reads their checkpoint; the others are whole.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal: Any = AutoModelForCausalLM
    return causal if type(config) in causal._model_mapping else AutoModelForImageTextToText


def _quantisation(folder: Path, written: dict[str, Any]) -> str | None:
    """The format in which the weights of a target are quantised, None where they are plain.

    Raises:
        DataError: transformers does not know it, and would take the stored codes for weights, without their scales.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    found = written.get("quantization_config")
    if found is None and (folder / "hf_quant_config.json").exists():  # Model-Optimizer's own file
        method = "modelopt"
    elif found is None:
        return None
    else:
        method = str(found.get("quant_method"))
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise DataError(
            f"{folder} has weights that are quantised by {method}, which transformers does not read, wanted one of "
            f"{', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}; give the same target in one of these formats"
        )
    return method


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose input EAGLE-3 reads by default: 2, num_layers // 2 and num_layers - 3.

    Raises:
        DataError: the target has so few layers that these are not three different ones.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise DataError(
            f"a target of {num_layers} layers has no default aux layers ({layers} are not three); "
            "name distinct ones with --aux-layers, for example " + ",".join(map(str, range(1, min(4, num_layers))))
        )
    return layers


def check_aux_layers(aux_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the ids as a tuple; DataError unless they are ascending, distinct and ids of layers."""
    layers = tuple(aux_layers)
    if list(layers) != sorted(set(layers)) or (layers and not 0 <= layers[0] <= layers[-1] < num_layers):
        raise DataError(
            f"aux layers {','.join(map(str, layers))} are not distinct, ascending ids between 0 and {num_layers - 1}; "
            "correct --aux-layers (id i is the input of layer i)"
        )
    return layers


@dataclass(frozen=True)
class Readout:
    """The target's logits from its last hidden state: softcap(factor * (last @ weight.T + bias))."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Readout:
        """The readout of a model, as its config describes it; `Taps` checks it against the model's own logits."""
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        if head is None:
            raise DataError(f"{type(model).__name__} has no lm_head; give a causal language model")
        return cls(head.weight, getattr(head, "bias", None), *readout_scale(config))

    def __call__(self, last: Tensor) -> Tensor:
        """Logits [..., V] of last [..., H], in the dtype of the weight."""
        logits = nn.functional.linear(last.to(self.weight.dtype), self.weight, self.bias)
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Taps:
    """Hooks on a target that return its aux hidden states and its last hidden state.

    Aux layer i is the residual stream that enters layer i: transformers' `hidden_states[i]`. One more than the last
    layer is what that layer leaves, before the final norm, which some heads were trained on. A context manager; `close`
    removes the hooks.

    Raises:
        DataError: the layers cannot be found, an id is no layer, or `readout` does not give the model's logits.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int]) -> None:
        self.decoder = find_decoder(model)
        config = model.config.get_text_config()
        layers = find_layers(self.decoder, config.num_hidden_layers)
        self.aux_layers = check_aux_layers(aux_layers, len(layers) + 1)
        self.hidden_size = int(config.hidden_size)
        self.readout = Readout.of(model)
        self._device = self.readout.weight.device
        self._aux: Tensor | None = None
        self._hooks = [
            layers[-1].register_forward_hook(self._store_output(place))
            if layer == len(layers)
            else layers[layer].register_forward_pre_hook(self._store(place), with_kwargs=True)
            for place, layer in enumerate(self.aux_layers)
        ]
        try:
            self._check_readout(model)
        except BaseException:
            self.close()
            raise

    def run(self, ids: Tensor, lengths: Sequence[int] | Tensor) -> tuple[Tensor | None, Tensor]:
        """Run the target over right-padded rows.

        Rows are not packed, because recurrent and chunked attention would mix the documents of one row.

        Args:
            ids: [b, n] int64; padding may be any token.
            lengths: b lengths in tokens.

        Returns:
            aux [b, n, A * H] (None without aux layers) and last [b, n, H], in the target's dtype and on its device; 0
            at the positions of padding.
        """
        b, n = ids.shape
        dtype, width = self.readout.weight.dtype, len(self.aux_layers) * self.hidden_size
        # Made outside inference mode: autograd refuses inference tensors, and a trainer computes gradients with these.
        last = torch.empty(b, n, self.hidden_size, dtype=dtype, device=self._device)
        self._aux = torch.empty(b, n, width, dtype=dtype, device=self._device) if width else None
        with torch.inference_mode():
            # No attention mask: every layer is causal, so padding on the right changes no token before it.
            last.copy_(self.decoder(input_ids=ids.to(self._device), use_cache=False).last_hidden_state)
            for row, length in enumerate(lengths):
                last[row, int(length) :] = 0
                if self._aux is not None:
                    self._aux[row, int(length) :] = 0
        aux, self._aux = self._aux, None
        return aux, last

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Taps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _store(self, place: int) -> Any:
        columns = slice(place * self.hidden_size, (place + 1) * self.hidden_size)

        def store(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = arguments[0] if arguments else keywords["hidden_states"]
            if self._aux is None:  # the model runs, but not through `run`
                return
            if states.shape != (*self._aux.shape[:2], self.hidden_size):
                raise DataError(
                    f"layer {self.aux_layers[place]} of the target reads hidden states {tuple(states.shape)}, wanted "
                    f"{(*self._aux.shape[:2], self.hidden_size)}; this architecture is not supported"
                )
            self._aux[..., columns].copy_(states)  # now, because a layer may change its input in place

        return store

    def _store_output(self, place: int) -> Any:
        """As `_store`, of what a layer returns: its states, or a tuple that begins with them."""
        store = self._store(place)
        return lambda layer, _, out: store(layer, out if isinstance(out, tuple) else (out,), {})

    def _check_readout(self, model: Any) -> None:
        vocabulary = self.readout.weight.shape[0]
        # Multimodal classes replace the tokens that stand for images.
        marks = {i for name, i in model.config.to_dict().items() if name.endswith(("_token_id", "_token_index"))}
        tokens = (i * 7919 % vocabulary for i in range(1, 2 * PROBE_TOKENS))
        probe = torch.tensor([[i for i in tokens if i not in marks][:PROBE_TOKENS]], device=self._device)
        with torch.inference_mode():
            wanted = model(input_ids=probe, use_cache=False).logits.float()
        _, last = self.run(probe, [probe.shape[1]])
        with torch.inference_mode():
            found = self.readout(last).float()
        if found.shape != wanted.shape:
            raise DataError(
                f"{type(model).__name__} has logits {tuple(wanted.shape)}, its lm_head gives {tuple(found.shape)}; "
                "this architecture is not supported"
            )
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        if not difference <= TOLERANCE.get(self.readout.weight.dtype, 1e-4):
            raise DataError(
                f"the logits of {type(model).__name__} are not factor {self.readout.factor} and softcap "
                f"{self.readout.softcap} of its lm_head on its last hidden state (they differ by {difference:.1%}); "
                "this architecture computes its logits in another way and is not supported"
            )


def find_decoder(model: Any) -> nn.Module:
    """The part of a model that ends with the final norm: without lm_head, and without the vision tower."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if any(module is head for module in decoder.modules()):  # Llama 4 returns its language model with the head
        decoder = getattr(decoder, "model", decoder)
    return decoder


def find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The stack of decoder layers: the only outermost ModuleList of that length.

    Raises:
        DataError: there is none, or more than one.
    """
    stacks: dict[str, nn.ModuleList] = {}
    inside: tuple[str, ...] = ()
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(inside):
            inside += (f"{name}.",)  # a list inside a list holds experts, not layers
            if len(module) == num_layers:
                stacks[name] = module
    if len(stacks) != 1:
        raise DataError(
            f"{type(decoder).__name__} has {len(stacks)} lists of {num_layers} modules "
            f"({', '.join(stacks) or 'none'}), wanted the one of its layers; this architecture is not supported"
        )
    return next(iter(stacks.values()))
