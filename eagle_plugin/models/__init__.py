"""Real small models for demos and tests, prepared once into the user's cache."""

from eagle_plugin.models.catalog import CATALOG, ModelError, PackageFile, find
from eagle_plugin.models.store import get_model, installed, model_folder

__all__ = ["CATALOG", "PackageFile", "ModelError", "find", "get_model", "installed", "model_folder"]
