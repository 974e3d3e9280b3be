"""The files of a draft head's checkpoint: config.json, safetensors headers, and the names of its tensors."""

from __future__ import annotations

import codecs
import errno
import json
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from eagle_plugin.common.errors import UserError, json_fault
from eagle_plugin.core.shape import Levels
from eagle_plugin.heads.pickles import conversion, pickles_of

if TYPE_CHECKING:
    from torch import Tensor

# As SGLang names them; P-EAGLE heads are of EAGLE3's architecture.
Algorithm = Literal["EAGLE", "EAGLE3", "DFLASH", "DSPARK"]
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # a head's weights; safetensors' name: torch's
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # names of P-EAGLE's mask token in config.json
LEGACY_NAMES = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


class HeadError(UserError):
    """A head cannot serve its target: one sentence with what was found, what was wanted and the fix."""


class LeftToEngine(HeadError):
    """The plugin's worker does not serve the head, but the engine's own may: a server leaves it to that one."""


Judge = Callable[[str], None]  # gets one sentence that is about a head


def refuse(sentence: str) -> None:
    """Raise HeadError with this sentence."""
    raise HeadError(sentence)


@dataclass(frozen=True)
class StoredTensor:
    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: BF16, F32, I64

    def data(self) -> bytes:
        """Its values as they are stored; the file is read as `read_tensors` has checked it."""
        with self.file.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(length))[self.name]["data_offsets"]
            file.seek(8 + length + begin)
            return file.read(end - begin)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json of a checkpoint folder.

    Raises:
        HeadError: the folder or its config.json is missing, or config.json is not a JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    refuse_special_file(folder, folder=True)
    if not folder.is_dir():
        raise HeadError(f"{folder} is not a folder; give the folder that holds config.json and model.safetensors")
    refuse_special_file(path)
    if not path.is_file():
        raise HeadError(f"{folder} has no config.json; give the checkpoint folder itself, as the exporter wrote it")
    return read_json(path)


def refuse_special_file(path: Path, *, folder: bool = False) -> None:
    """Refuse what can be there in place of a file (or folder) and cannot be read as one, such as a pipe.

    Raises:
        HeadError: it is a loop of symbolic links, a pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise HeadError(
                f"{path} is a symbolic link that leads back to itself, wanted a {'folder' if folder else 'file'}; "
                "copy the checkpoint again"
            ) from error
        return  # missing, or hidden from this user: whoever reads it says so
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket or device"
        raise HeadError(
            f"{path} is {kind}, wanted a {'folder' if folder else 'file'}, which engines read more than once; copy the "
            "checkpoint to a disk"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint folder.

    Raises:
        HeadError: it cannot be read, or is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HeadError(f"{path} cannot be read ({error.strerror}); give a checkpoint that you may read") from error
    except (ValueError, RecursionError) as error:
        if path.read_bytes().startswith(codecs.BOM_UTF8):
            raise HeadError(
                f"{path} begins with a byte order mark (BOM), which the engines' readers refuse, wanted UTF-8 without "
                "one; save it again as plain UTF-8"
            ) from error
        raise HeadError(f"{path} {json_fault(error)}; copy the checkpoint again") from error
    if not isinstance(values, dict):
        raise HeadError(f"{path} holds a JSON {type(values).__name__}, wanted an object; copy the checkpoint again")
    return values


def read_size(config: dict[str, Any], key: str, where: Path | str) -> int:
    """Return a key of a config.json that must be a positive whole number.

    Raises:
        HeadError: it is missing or something else.
    """
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise HeadError(f"{where} has {key} {value!r}, wanted a positive whole number; correct or add the key")
    return value


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the language model in a target's config.json; keys that it lacks come from a multimodal wrapper."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def read_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder's safetensors files (one, or shards with an index) by its stored name.

    Raises:
        HeadError: there is no safetensors file, a shard is missing, a header is corrupt, or two shards contradict each
            other; `LeftToEngine` where the weights are pickles.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(Path(folder)):
        refuse_special_file(path)
        try:
            with safe_open(str(path), framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    found = StoredTensor(name, path, tuple(part.get_shape()), part.get_dtype())
                    _refuse_two_values(tensors.setdefault(name, found), found)
        except (SafetensorError, OSError) as error:
            raise HeadError(
                f"{path} cannot be read as safetensors ({error}); it is truncated or of another format, "
                "copy or convert the checkpoint again"
            ) from error
    return tensors


def _refuse_two_values(first: StoredTensor, second: StoredTensor) -> None:
    """Refuse one tensor in two shards with different values: an engine keeps the one that it reads last."""
    if first is second or (first.shape, first.dtype) == (second.shape, second.dtype) and first.data() == second.data():
        return
    raise HeadError(
        f"{first.file.parent} has {first.name} in {first.file.name} and, with other values, in {second.file.name}, "
        "wanted it once; remove the shards that are not of this head and copy it again with its index"
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    refuse_special_file(index)
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeadError(f"{index} has no usable weight_map ({error!r}); copy the checkpoint again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise HeadError(f"{index} names {', '.join(missing)}, which {folder} lacks; copy all {len(names)} shards")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if pickles := pickles_of(folder):
            raise LeftToEngine(  # both engines load these
                f"{folder} has only {', '.join(pickles)}, wanted model.safetensors: the plugin reads no pickles, "
                f"which can run code; convert the weights with: {conversion(folder, pickles)}"
            )
        raise HeadError(f"{folder} has no weights, wanted model.safetensors; copy the checkpoint again")
    return files


def read_mask_token(config: dict[str, Any], where: Path | str = "config.json of the head") -> int | None:
    """The id of P-EAGLE's mask token in a head's config.json, under the first of the names that vLLM reads.

    Raises:
        HeadError: it is not a whole number.
    """
    for key in MASK_KEYS:
        value = config.get(key)
        if value is not None:
            if type(value) is not int:
                raise HeadError(f"{where} has {key} {value!r}, wanted a whole number; correct config.json")
            return value
    return None


def levels_of(config: dict[str, Any], where: Path | str = "config.json of the head") -> Levels:
    """How the head with this config.json drafts the levels of a tree."""
    return Levels.RECURRENT if read_mask_token(config, where) is None else Levels.PARALLEL


def check_mask_token(token: int | None, vocabulary: int, found: str) -> int:
    """The id of P-EAGLE's mask token, of a head whose target has so many tokens; found: whose it is, before the id.

    Raises:
        HeadError: it is missing or not an id of the target.
    """
    if token is None or not 0 <= token < vocabulary:
        raise HeadError(
            f"{found} {token}, wanted 0 to {vocabulary - 1}; write the id of the token that masked rows were trained "
            "with into config.json"
        )
    return token


def canonical_name(name: str) -> str:
    """The parameter of a head that the tensor `name` of a checkpoint belongs to, without the prefix `model.`.

    The names of all trainers are known: `midlayer.`, `layers.0.`, the aux_norm names and an optional `model.`.
    """
    for legacy, new in LEGACY_NAMES.items():
        name = name.replace(legacy, new)
    for table in ("d2t", "t2d", "mask_hidden"):
        if table in name:
            return table
    return name.removeprefix("model.")


def layer_config(written: dict[str, Any]) -> dict[str, Any]:
    """A head's config.json with the keys of its layers at the top; speculators keep them in a part of their own.

    That part has the defaults of the layers' class too: a null there does not hide a value at the top.
    """
    inner = written.get("transformer_layer_config")
    if not isinstance(inner, dict):
        return dict(written)
    return written | {key: value for key, value in inner.items() if value is not None or key not in written}


def count_layers(names: Iterable[str]) -> int:
    """The number of layers in a head; names: of its tensors, canonical."""
    return len({name.split(".")[1] for name in names if name.startswith("layers.")})


def by_parameter(stored: dict[str, StoredTensor], rename: Callable[[str], str]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by the parameters that `rename` makes of their stored names.

    Raises:
        HeadError: two tensors are for one parameter.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        other = found.setdefault(rename(name), tensor)
        if other is not tensor:
            raise HeadError(
                f"{tensor.file.parent} has {other.name} and {name}, two tensors for {rename(name)}, wanted one, "
                "because an engine keeps the one that it reads last; remove the one that the head was not trained with"
            )
    return found


def load_weights(folder: str | Path, rename: Callable[[str], str] = canonical_name) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint folder on the CPU, by the names that `rename` makes of the stored ones.

    Raises:
        HeadError: as `read_tensors` and `by_parameter`.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in by_parameter(read_tensors(folder), rename).items():
        with safe_open(str(tensor.file), framework="pt") as file:
            weights[name] = file.get_tensor(tensor.name)
    return weights
