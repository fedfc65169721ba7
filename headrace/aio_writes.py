"""Writes on bidirectional grpc.aio calls that leave the call's status alone. Knows no service.

When the peer has ended a call, a write fails, as it must. grpc.aio then replaces the status that the peer gave, and
that may not have been read yet, by INTERNAL "Internal error from Core", and the messages that had arrived before it
cannot be read any more (grpc/grpc#36066, open as of grpcio 1.85). Whoever grants credits while it reads meets this at
the end of nearly every call.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import grpc.aio

C = TypeVar("C")
_NEEDED = ("_write", "_cython_call", "_metadata_sent")


def protect(call: C) -> C:
    """The same call; a write that comes too late does nothing, and the end is for the reader to see.

    Reaches into grpc.aio's own objects, of this call alone; where they are no longer what they were, changes nothing.
    """
    made: Any = call
    if not all(hasattr(made, name) for name in _NEEDED):
        return call

    async def write(message: Any) -> None:
        if made.done():
            return
        if not made._metadata_sent.is_set():  # noqa: SLF001
            await made._metadata_sent.wait()  # noqa: SLF001
            if made.done():
                return
        with contextlib.suppress(grpc.aio.InternalError):
            await made._cython_call.send_serialized_message(message.SerializeToString())  # noqa: SLF001

    made._write = write  # noqa: SLF001
    return call
