"""The error catalogue: every way a call can fail, for the server that raises and the client that catches.

Knows no channel and no server: an error becomes a `google.rpc.Status` and is read back from one.

    HeadraceError
    ├── InvalidArgument     INVALID_ARGUMENT    a field is at fault, and named
    ├── Unauthenticated     UNAUTHENTICATED     no or unknown identity
    ├── PermissionDenied    PERMISSION_DENIED   known, but not allowed
    ├── NotFound            NOT_FOUND           no such model or stream
    ├── Aborted             ABORTED             another reader resumed the stream
    ├── ResourceExhausted   RESOURCE_EXHAUSTED  a queue or quota is full; `retry_after_s` says when to retry
    ├── DeadlineExceeded    DEADLINE_EXCEEDED   the caller's time is up
    ├── Cancelled           CANCELLED           the caller gave up
    ├── Unavailable         UNAVAILABLE         starting, shutting down or lost; retry if nothing was received
    ├── Unimplemented       UNIMPLEMENTED       a named field or call is not honoured yet
    └── Internal            INTERNAL            a fault of the server
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "headrace"
MAX_MESSAGE_BYTES = 1000  # percent-encoded in a trailer it can be three times that
STATUS_DETAILS_KEY = "grpc-status-details-bin"


class Reason(StrEnum):
    """Machine-readable reasons, as `google.rpc.ErrorInfo.reason` carries them."""

    INVALID_FIELD = "INVALID_FIELD"
    CONTEXT_LENGTH = "CONTEXT_LENGTH"  # the prompt leaves no room in the context
    OUT_OF_VOCABULARY = "OUT_OF_VOCABULARY"  # a token id that the model does not have
    KV_CAPACITY = "KV_CAPACITY"  # prompt + max_tokens never fit the KV pool
    EMPTY_PROMPT = "EMPTY_PROMPT"  # the input encodes to no token
    INPUT_TOO_LARGE = "INPUT_TOO_LARGE"  # refused before encoding
    CHAT_TEMPLATE = "CHAT_TEMPLATE"  # the template itself refused the conversation
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    QUEUE_FULL = "QUEUE_FULL"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"  # more waiting is ahead than time is left
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"  # a limit of the caller's key; `quota` says which
    SLOW_CONSUMER = "SLOW_CONSUMER"  # the reader made no progress for too long
    STREAM_NOT_FOUND = "STREAM_NOT_FOUND"  # nothing to resume: unknown, expired or another tenant's
    SUPERSEDED = "SUPERSEDED"  # another reader resumed the stream
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    STARTING = "STARTING"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    PEER_LOST = "PEER_LOST"  # a process that was needed went away
    NOT_HONOURED = "NOT_HONOURED"  # in the contract, not yet built
    INTERNAL = "INTERNAL"


class HeadraceError(Exception):
    """A failed call.

    Attributes:
        code: the gRPC status code, an integer of `google.rpc.Code`.
        reason: a `Reason`, or the unknown word of a newer server.
        message: one sentence, cut to `MAX_MESSAGE_BYTES` of UTF-8; never holds a prompt.
        field: path of the field at fault, "" if none is.
        quota: the limit that is reached, "requests_per_minute=10"; "" if none is.
        retry_after_s: seconds after which a retry can help; None if unknown or if none can.
        request_id: the server's id for the request, "" if unknown.
        lost_address: host:port of the process that was lost, "" unless one was.
    """

    code: int = code_pb2.UNKNOWN
    default_reason: ClassVar[Reason] = Reason.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        quota: str = "",
        lost_address: str = "",
    ) -> None:
        self.message = message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
        self.reason = reason or self.default_reason
        self.field = field
        self.quota = quota
        self.retry_after_s = retry_after_s
        self.request_id = ""
        self.lost_address = lost_address
        super().__init__(self.message)


class InvalidArgument(HeadraceError):
    """A field of the request is at fault; `field` names it."""

    code = code_pb2.INVALID_ARGUMENT
    default_reason = Reason.INVALID_FIELD


class Unauthenticated(HeadraceError):
    """The caller gave no identity, or one that is unknown."""

    code = code_pb2.UNAUTHENTICATED
    default_reason = Reason.UNAUTHENTICATED


class PermissionDenied(HeadraceError):
    """The caller is known, but may not do this."""

    code = code_pb2.PERMISSION_DENIED
    default_reason = Reason.PERMISSION_DENIED


class NotFound(HeadraceError):
    """There is no such model or stream."""

    code = code_pb2.NOT_FOUND
    default_reason = Reason.MODEL_NOT_FOUND


class Aborted(HeadraceError):
    """Somebody else goes on with what this call was doing."""

    code = code_pb2.ABORTED
    default_reason = Reason.SUPERSEDED


class ResourceExhausted(HeadraceError):
    """A queue or a quota is full."""

    code = code_pb2.RESOURCE_EXHAUSTED
    default_reason = Reason.QUEUE_FULL


class DeadlineExceeded(HeadraceError):
    """The caller's time is up. Tokens already received stay valid."""

    code = code_pb2.DEADLINE_EXCEEDED
    default_reason = Reason.DEADLINE_EXCEEDED


class Cancelled(HeadraceError):
    """The caller gave up."""

    code = code_pb2.CANCELLED
    default_reason = Reason.CANCELLED


class Unavailable(HeadraceError):
    """A process is starting, shutting down or lost."""

    code = code_pb2.UNAVAILABLE
    default_reason = Reason.PEER_LOST


class Unimplemented(HeadraceError):
    """The contract has it; this version does not honour it yet."""

    code = code_pb2.UNIMPLEMENTED
    default_reason = Reason.NOT_HONOURED


class Internal(HeadraceError):
    """A fault of the server."""

    code = code_pb2.INTERNAL
    default_reason = Reason.INTERNAL


BY_CODE: dict[int, type[HeadraceError]] = {cls.code: cls for cls in HeadraceError.__subclasses__()}


def to_status(error: HeadraceError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error: ErrorInfo always, the others where they apply."""
    status = status_pb2.Status(code=error.code, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key in ("request_id", "lost_address"):
        if getattr(error, key):
            info.metadata[key] = getattr(error, key)
    details: list[Message] = [info]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.quota:
        exceeded = error_details_pb2.QuotaFailure.Violation(subject=error.quota, description=error.message)
        details.append(error_details_pb2.QuotaFailure(violations=[exceeded]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def from_status(status: status_pb2.Status) -> HeadraceError:
    """The error that a `google.rpc.Status` stands for; unknown codes give a plain `HeadraceError`."""
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    quota = error_details_pb2.QuotaFailure()
    for detail in status.details:
        for message in (info, request, retry, quota):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    error = BY_CODE.get(status.code, HeadraceError)(
        status.message,
        reason=info.reason,
        field=request.field_violations[0].field if request.field_violations else "",
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        quota=quota.violations[0].subject if quota.violations else "",
        lost_address=info.metadata.get("lost_address", ""),
    )
    error.code = status.code
    error.request_id = info.metadata.get("request_id", "")
    return error


def from_call(code: int, message: str, trailing_metadata: object) -> HeadraceError:
    """The error of a failed call, from its status code, text and trailing metadata (pairs, or None)."""
    for key, value in trailing_metadata or ():  # type: ignore[attr-defined]
        if key == STATUS_DETAILS_KEY:
            return from_status(status_pb2.Status.FromString(value))
    return from_status(status_pb2.Status(code=code, message=message))
