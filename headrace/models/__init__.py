"""Models on this machine: where they live, how they get there.

Nothing here imports torch, transformers or tokenizers when it is imported; a conversion loads them in a
process of its own and that process ends with it.
"""

from headrace.models.errors import ImportFailed, ModelBroken, ModelError, ModelNotFound, Progress
from headrace.models.importer import import_model
from headrace.models.store import (
    DEFAULT_MODEL,
    ModelInfo,
    cache_dir,
    list_models,
    models_dir,
    resolve,
    validate,
)

__all__ = [
    "DEFAULT_MODEL",
    "ImportFailed",
    "ModelBroken",
    "ModelError",
    "ModelInfo",
    "ModelNotFound",
    "Progress",
    "cache_dir",
    "import_model",
    "list_models",
    "models_dir",
    "resolve",
    "validate",
]
