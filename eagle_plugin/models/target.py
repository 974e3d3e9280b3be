"""A command's TARGET or --target: a folder, a name of the catalogue, or that of a public model."""

from pathlib import Path

from eagle_plugin.common.progress import progress_bar
from eagle_plugin.models.catalog import CATALOG, ModelError
from eagle_plugin.models.hub import fetch_repository
from eagle_plugin.models.public import HEADS as PUBLIC_HEADS
from eagle_plugin.models.public import PUBLIC
from eagle_plugin.models.shipped import HEADS
from eagle_plugin.models.store import Stage, get_model, installed, model_folder


def target_folder(name: str | Path, report: Stage | None = None) -> Path:
    """The folder itself, or that of the model of this name, which is prepared or downloaded first if it is absent.

    report: called as in `get_model`; without it a bar on stderr shows the progress.
    ModelError: there is neither, or the model cannot be prepared.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if str(name) in PUBLIC:
        return fetch_repository(PUBLIC[str(name)].target)
    if str(name) in (*HEADS, *PUBLIC_HEADS):
        raise ModelError(
            f"{name} is the name of a draft head, wanted a target: a folder, or a name such as {next(iter(CATALOG))}"
        )
    if str(name) not in CATALOG:
        raise ModelError(
            f"target {name} is neither a folder nor a model of `eagle-plugin models list` ({', '.join(CATALOG)}, ...); "
            "give the folder of a checkpoint (from the Hugging Face hub: hf download NAME --local-dir FOLDER)"
        )
    if report is not None:
        return get_model(str(name), report)
    if installed(str(name)):  # the bar, and reading the whole model for its sha256, are for a model that is new
        return model_folder(str(name))
    with progress_bar() as bar:
        return get_model(str(name), bar)
