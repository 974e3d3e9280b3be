"""Fetches a checkpoint from the Hugging Face hub into the hub's own cache."""

from pathlib import Path
from typing import Any

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
            f"{name} could not be fetched from the Hugging Face hub ({hub_reason(error)}); where the hub can be "
            f"reached, run: hf download {name} --local-dir FOLDER, and give that folder"
        ) from error
    if not any(found.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no safetensors on the Hugging Face hub, and pickles are not loaded, because they can run "
            "code; write them again as docs/targets.md says, and give that folder"
        )
    return found


def hub_reason(error: Exception) -> str:
    """Why the hub did not give a repository, and what to do where it wants a token."""
    if type(error).__name__ == "GatedRepoError":
        return "it is gated: ask for access on its page of the hub, and set HF_TOKEN to a token of that account"
    response: Any = getattr(error, "response", None)
    if getattr(response, "status_code", None) in (401, 403):
        return "there is no such repository, or it is private: correct the name, or set HF_TOKEN to a token with access"
    if type(error).__name__ == "LocalEntryNotFoundError":
        return "it is not in the hub's cache of this machine, and the hub cannot be reached from here"
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
