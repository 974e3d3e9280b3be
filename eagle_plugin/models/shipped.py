"""What comes with the package: a draft head, the questions of the demo and a recipe.

In a wheel they are inside the package (setup.py copies them), in a checkout beside it, in examples/.
"""

from pathlib import Path

from eagle_plugin.models.catalog import ModelError
from eagle_plugin.models.hub import fetch_repository
from eagle_plugin.models.public import HEADS as PUBLIC_HEADS

HEAD = "smollm2-135m-instruct-eagle3"
PACKAGE = Path(__file__).resolve().parent.parent


def examples_folder() -> Path:
    """The folder with heads/, prompts/ and recipes/; ModelError if the installation lacks it."""
    places = (PACKAGE / "examples", PACKAGE.parent / "examples")
    for place in places:
        if (place / "heads").is_dir():
            return place
    raise ModelError(f"no examples folder found in {PACKAGE} or beside it; install eagle-plugin again")


def shipped_heads() -> list[str]:
    """The names of the draft heads that come with the package."""
    return sorted(path.name for path in (examples_folder() / "heads").iterdir() if (path / "config.json").is_file())


def head_folder(name: str | Path) -> Path:
    """The folder of that path, of the shipped head of that name, or of a public model's head, which is downloaded; a
    name of none of them is returned as it is.

    The command that reads the head says what is wrong with a folder, so nothing is refused here.
    """
    if not Path(name).exists() and str(name) in PUBLIC_HEADS:
        return fetch_repository(str(name))
    if Path(name).exists() or str(name) not in shipped_heads():
        return Path(name)
    return examples_folder() / "heads" / name


def question_files() -> list[Path]:
    """The JSON-lines files of the questions that the demo asks."""
    return sorted((examples_folder() / "prompts").glob("*.jsonl"))


def recipe_file(name: str | Path) -> Path:
    """The file of that path, or the shipped recipe of that name; a name of neither is returned as it is."""
    shipped = examples_folder() / "recipes" / f"{name}.yaml"
    return shipped if shipped.is_file() and not Path(name).exists() else Path(name)
