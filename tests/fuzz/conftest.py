"""The fixtures of the pipeline's tests."""

from tests.pipeline.conftest import random_model, receiver, tiny_pipeline

__all__ = ["random_model", "receiver", "tiny_pipeline"]
