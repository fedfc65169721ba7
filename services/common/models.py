"""Which model a process serves, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.models import store
from services.common.serve import StartError
from services.common.settings import setting


@dataclass(frozen=True)
class ModelSettings:
    """The model, the same for every process of a pipeline."""

    SECTION = ""
    model: str = setting(store.DEFAULT_MODEL, "name in the model store, or a Hugging Face style directory")

    @property
    def name(self) -> str:
        """Name that callers ask by: the directory's last part, or the name in the store."""
        return Path(self.model).name

    def directory(self) -> Path:
        """Where the files are.

        Raises:
            StartError: there is no such model; the message has the command that mends it.
        """
        try:
            return store.resolve(self.model)
        except ValueError as error:
            raise StartError(str(error)) from error
