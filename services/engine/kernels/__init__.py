"""The arithmetic a decoder needs, behind one interface (``base``), with a plain twin (``reference``)."""

from services.engine.kernels.base import AttentionBatch, Kernels, Linear
from services.engine.kernels.cpu import CpuKernels, can_pack
from services.engine.kernels.deterministic import DeterministicKernels
from services.engine.kernels.reference import ReferenceKernels

__all__ = ["AttentionBatch", "CpuKernels", "DeterministicKernels", "Kernels", "Linear", "ReferenceKernels", "can_pack"]
