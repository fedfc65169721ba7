"""An error that is sent says to its receiver what it said to its sender."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from headrace import errors
from headrace.answers import error_of
from services.common.calls import peer_error


@pytest.mark.parametrize("kind", list(errors.BY_CODE.values()))
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"field": "sampling.top_p"},
        {"retry_after_s": 1.5, "quota": "requests_per_minute=10", "reason": errors.Reason.QUOTA_EXCEEDED},
        {"lost_address": "127.0.0.1:50052"},
    ],
)
def test_every_error_comes_out_as_it_went_in(kind: type[errors.HeadraceError], said: dict) -> None:
    """Kind, text, reason, field, quota, time of retry, request and the process that was lost."""
    sent = kind("it failed", **said)
    sent.request_id = "r-1"
    received = errors.from_status(errors.to_status(sent))
    assert (type(received), vars(received)) == (kind, vars(sent) | {"code": sent.code})


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_call_that_broke_names_the_process_that_was_lost(code: grpc.StatusCode) -> None:
    """Text for people, the address for whoever routes."""
    broken = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="connection reset")
    error = peer_error(broken, "engine", "127.0.0.1:50052")
    assert isinstance(error, errors.Unavailable)
    assert (error.reason, error.lost_address) == ("PEER_LOST", "127.0.0.1:50052")
    assert "engine at 127.0.0.1:50052" in error.message


def test_an_error_that_a_peer_passes_on_keeps_the_process_that_was_lost() -> None:
    """The stream process lost an engine; it is not the stream process that is lost."""
    status = errors.to_status(errors.Unavailable("lost the engine", lost_address="127.0.0.1:50052"))
    trailing = grpc.aio.Metadata((errors.STATUS_DETAILS_KEY, status.SerializeToString()))
    passed_on = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing)
    assert peer_error(passed_on, "stream process", "127.0.0.1:50051").lost_address == "127.0.0.1:50052"


def test_a_cancel_that_nobody_asked_for_is_a_lost_connection() -> None:
    """A server that is killed leaves calls CANCELLED, without a status of ours: another try can help."""

    def failure(*trailing: tuple[str, bytes]) -> SimpleNamespace:
        return SimpleNamespace(
            code=lambda: grpc.StatusCode.CANCELLED, details=lambda: "CANCELLED", trailing_metadata=lambda: trailing
        )

    assert isinstance(error_of(failure()), errors.Unavailable)
    status = errors.to_status(errors.Cancelled("by the reader")).SerializeToString()
    assert isinstance(error_of(failure((errors.STATUS_DETAILS_KEY, status))), errors.Cancelled)
