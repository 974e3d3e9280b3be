"""Small real models, made once in the user's cache, and the head and questions that come with the package."""

from eagle_plugin.models.catalog import CATALOG, ModelError, PackageFile, find
from eagle_plugin.models.hub import fetch_repository
from eagle_plugin.models.public import PUBLIC, PublicModel
from eagle_plugin.models.shipped import HEADS, head_folder, heads_folder
from eagle_plugin.models.store import get_model, installed, model_folder
from eagle_plugin.models.target import target_folder

__all__ = [
    "CATALOG", "HEADS", "PUBLIC", "PackageFile", "PublicModel", "ModelError", "fetch_repository", "find", "get_model",
    "head_folder", "heads_folder", "installed", "model_folder", "target_folder",
]  # fmt: skip
