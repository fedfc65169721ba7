"""What can be wrong with a model, as one tree, and how long work tells what it is doing.

    ModelError(ValueError)
    ├── ModelNotFound    nothing of that name or at that place
    ├── ModelBroken      a file is missing, truncated or contradicts another
    └── ImportFailed     it could not be fetched or converted

Each message is one sentence: what was looked for, what was found, the command that mends it.
"""

from collections.abc import Callable

Progress = Callable[[str, float | None], None]  # (what is happening, share done 0..1 or None where unknown)

EXPLAINED = 3  # exit status of a conversion whose last line says, in one sentence, why it failed


class ModelError(ValueError):
    """A model cannot be used; the message says which file and what to do."""


class ModelNotFound(ModelError):
    """No directory and no stored model answers to the name."""


class ModelBroken(ModelError):
    """The model's directory exists, but a file in it is missing, truncated or contradictory."""


class ImportFailed(ModelError):
    """The source could not be fetched, or could not be turned into a model directory."""
