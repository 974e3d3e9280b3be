"""Well-known data sets to train on, by name: from a local copy, from a package, or from the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from eagle_plugin.common.file_digests import hash_file
from eagle_plugin.learning.data.provenance import UNKNOWN, Terms, license_in, license_of
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.builtin_prompts import SHAREGPT
from eagle_plugin.learning.data.sources.packages import cached_file
from eagle_plugin.learning.data.sources.record_files import LocatedObject, read_objects
from eagle_plugin.models.catalog import PackageFile
from eagle_plugin.models.hub import hub_reason

Chat = dict[str, Any]


class TrainingSet(NamedTuple):
    """Where a set is, and how one of its records becomes a chat.

    files: patterns of the training files in the repository of the hub, as `fnmatch`; of a local folder, of file names.
    package: a package that holds the set, instead of the hub.
    forbids: what of it a model of OpenAI wrote, whose terms forbid to train competing models on its output.
    """

    hub: str
    files: tuple[str, ...]
    chat: Callable[[dict[str, Any]], Chat]
    package: PackageFile | None = None
    forbids: Literal["nothing", "answers", "all"] = "nothing"

    def terms(self, license: str) -> Terms:
        """The terms of the set under this licence."""
        return Terms(license, None if self.forbids == "nothing" else False, self.forbids == "answers")


class FoundSet(NamedTuple):
    """The files of a set on this machine. origin: "path", "package NAME VERSION" or "hub NAME@REVISION"."""

    files: list[Path]
    origin: str
    license: str

    def sha256(self) -> str:
        """One digest of the contents of all files, in their order; of one file its own sha256."""
        digests = [hash_file(path) for path in self.files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _pair(question: str, answer: str) -> Callable[[dict[str, Any]], Chat]:
    def chat(record: dict[str, Any]) -> Chat:
        turns = [{"role": "user", "content": record[question]}]
        if record.get(answer):
            turns.append({"role": "assistant", "content": record[answer]})
        return {"messages": turns}

    return chat


def _as_it_is(record: dict[str, Any]) -> Chat:
    return {"messages": record["messages"]} if "messages" in record else {"conversations": record["conversations"]}


TRAINING_SETS = {
    "gsm8k": TrainingSet("openai/gsm8k", ("main/train-*.parquet",), _pair("question", "answer")),
    "magicoder": TrainingSet(
        "ise-uiuc/Magicoder-OSS-Instruct-75K",
        ("data-oss_instruct-decontaminated.jsonl",),
        _pair("problem", "solution"),
        forbids="all",
    ),
    "opencodeinstruct": TrainingSet("nvidia/OpenCodeInstruct", ("data/train-*.parquet",), _pair("input", "output")),
    "swebench": TrainingSet("princeton-nlp/SWE-bench", ("data/train-*.parquet",), _pair("problem_statement", "")),
    "ultrachat": TrainingSet("HuggingFaceH4/ultrachat_200k", ("data/train_sft-*.parquet",), _as_it_is, forbids="all"),
    "sharegpt": TrainingSet(
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        ("ShareGPT_V3_unfiltered_cleaned_split.json",),
        _as_it_is,
        SHAREGPT,
        forbids="answers",
    ),
}


def find_set(name: str, path: Path | None = None, revision: str | None = None) -> FoundSet:
    """The files of a set: below `path`, or else of its package, or else of the hub's repository at `revision`.

    Raises:
        DataError: there is no such set or path, or it cannot be downloaded.
    """
    if name not in TRAINING_SETS:
        raise DataError(f"there is no data set {name!r}; wanted one of {', '.join(TRAINING_SETS)}")
    wanted = TRAINING_SETS[name]
    if path is not None:
        return FoundSet(_local_files(name, path, wanted), "path", license_of(path) if path.is_dir() else UNKNOWN)
    if (package := wanted.package) is not None and revision is None:
        return FoundSet([cached_file(package)], f"package {package.package} {package.version}", package.license)
    return _from_hub(name, wanted, revision)


def read_chats(name: str, files: list[Path]) -> Iterator[Chat]:
    """The records of a set as chats that `data prepare` reads; records that are cut off at the end are left out.

    Raises:
        DataError: a file is damaged, or its records are not those of the set.
    """
    for path in files:
        for found in read_objects(str(path)):
            if not isinstance(found, LocatedObject):
                continue
            try:
                yield TRAINING_SETS[name].chat(found.value)
            except KeyError as error:
                raise DataError(
                    f"{found.where} has no field {error}, wanted a record of {name}; give the files of that set"
                ) from error


def _local_files(name: str, path: Path, wanted: TrainingSet) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"the data set {name} is not in {path}, which does not exist; give its file or folder")
    patterns = [pattern.rsplit("/", 1)[-1] for pattern in wanted.files]
    kept = sorted(file for pattern in patterns for file in path.rglob(pattern) if file.is_file())
    if not kept:
        raise DataError(f"{path} has no file {' or '.join(patterns)} of the data set {name}; give the file itself")
    return kept


def _from_hub(name: str, wanted: TrainingSet, revision: str | None) -> FoundSet:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise OSError("HF_HUB_OFFLINE is set")
        info = HfApi().dataset_info(wanted.hub, revision=revision)
        names = sorted(item.rfilename for item in info.siblings or [])
        kept = [file for file in names if any(fnmatch.fnmatch(file, pattern) for pattern in wanted.files)]
        if not kept:
            raise DataError(
                f"{wanted.hub} at {info.sha} has no file {' or '.join(wanted.files)}; name another --revision, or the "
                "set's files with --path"
            )
        paths = [Path(hf_hub_download(wanted.hub, file, repo_type="dataset", revision=info.sha)) for file in kept]
    except DataError:
        raise
    # The hub's client raises errors of httpx, of its own and OSError, without a common base.
    except Exception as error:
        raise DataError(
            f"the data set {name} cannot be downloaded from {wanted.hub} ({hub_reason(error)}); check the network, or "
            "give a local copy with --path (prompts.sets.N.path in a recipe)"
        ) from error
    card = getattr(info, "card_data", None)
    found = license_in(card.to_dict()) if card is not None else None
    return FoundSet(paths, f"hub {wanted.hub}@{info.sha}", found or UNKNOWN)
