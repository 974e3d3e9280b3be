"""What comes with the package: the questions of the demo, recipes, and, as a distribution of their own, draft heads.

In a wheel questions and recipes are inside the package (setup.py copies them), in a checkout beside it, in examples/.
"""

from importlib.util import find_spec
from pathlib import Path

from eagle_plugin.models.catalog import CATALOG, ModelError
from eagle_plugin.models.hub import fetch_repository
from eagle_plugin.models.public import HEADS as PUBLIC_HEADS
from eagle_plugin.models.public import PUBLIC

HEAD = "smollm2-135m-instruct-eagle3"
HEADS = (HEAD, "smollm2-135m-instruct-peagle")
PACKAGE = Path(__file__).resolve().parent.parent


def examples_folder() -> Path:
    """The folder with prompts/ and recipes/; ModelError if the installation lacks it."""
    places = (PACKAGE / "examples", PACKAGE.parent / "examples")
    for place in places:
        if (place / "prompts").is_dir():
            return place
    raise ModelError(f"no examples folder found in {PACKAGE} or beside it; install eagle-plugin again")


def heads_folder() -> Path:
    """The folder with the shipped heads; ModelError if they are not installed."""
    spec = find_spec("eagle_plugin_heads")
    installed = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for place in (PACKAGE.parent / "examples/heads", *installed):
        if (place / HEAD / "config.json").is_file():
            return place
    raise ModelError(
        "the heads of SmolLM2-135M-Instruct are in the package eagle-plugin-heads, which is not installed; run: "
        "pip install ./examples/heads in the folder of eagle-plugin, or its wheel; or name a head of yours"
    )


def head_folder(name: str | Path) -> Path:
    """The folder of that path, of the shipped head of that name, or of a public model's head, which is downloaded; a
    name of none of them is returned as it is.

    The command that reads the head says what is wrong with a folder. ModelError for the name of a target, or if the
    shipped heads are not installed.
    """
    if Path(name).exists():
        return Path(name)
    if str(name) in PUBLIC_HEADS:
        return fetch_repository(str(name))
    if str(name) in CATALOG or str(name) in PUBLIC:
        raise ModelError(
            f"{name} is the name of a target, wanted a draft head: a folder, or a name such as {HEAD} "
            "(eagle-plugin models list)"
        )
    return heads_folder() / name if str(name) in HEADS else Path(name)


def question_files() -> list[Path]:
    """The JSON-lines files of the questions that the demo asks."""
    return sorted((examples_folder() / "prompts").glob("*.jsonl"))


def recipe_file(name: str | Path) -> Path:
    """The file of that path, or the shipped recipe of that name; a name of neither is returned as it is."""
    shipped = examples_folder() / "recipes" / f"{name}.yaml"
    return shipped if shipped.is_file() and not Path(name).exists() else Path(name)
