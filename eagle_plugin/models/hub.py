"""Fetches a checkpoint from the Hugging Face hub into the hub's own cache."""

from pathlib import Path

from eagle_plugin.models.catalog import ModelError

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # what engines read; no pickles
COPIES = ["original/*", "metal/*"]  # the same weights in formats of other engines


def fetch_repository(name: str, *, cached: bool = False) -> Path:
    """The folder of a repository of the hub, which is downloaded unless it is there; the user's HF_ variables hold.

    cached: do not download.

    ModelError: it could not be fetched.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{name} is on the Hugging Face hub, and the Python package huggingface_hub is not installed here; use the "
            "environment of SGLang or vLLM"
        ) from error
    try:
        found = Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=COPIES, local_files_only=cached))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub ({_reason(error)}); where the hub can be reached, "
            f"run: hf download {name} --local-dir FOLDER, and give that folder"
        ) from error
    if not any(found.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no safetensors on the Hugging Face hub, and pickles are not loaded, because they can run "
            "code; write them again as docs/targets.md says, and give that folder"
        )
    return found


def _reason(error: Exception) -> str:
    if type(error).__name__ == "LocalEntryNotFoundError":
        return "it is not in the hub's cache of this machine, and the hub cannot be reached from here"
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
