"""TLS between the processes: every hop is encrypted, and who has no certificate is not let in."""

from __future__ import annotations

import grpc
import pytest

from tests import certificates
from tests.pipeline.conftest import PROCESSES, start_pipeline
from tests.pipeline.gateways import serves
from tests.pipeline.otlp import Receiver
from tests.redis_server import RedisServer

INSIDE = ("tokenizer", "stream", "engine")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def redis(made):
    server = RedisServer(certificates=made)
    yield server
    server.close()


@pytest.fixture(scope="module")
def encrypted(random_model, made, redis):
    """Four processes, each with the gateway's settings of its calls; the gateway's own port is plain text here."""
    settings = {
        "MODEL": str(random_model),
        "REDIS_URL": redis.url,
        "PEERS_TLS_CA": made / "ca.crt",
        "PEERS_TLS_CERTIFICATE": made / "gateway.crt",
        "PEERS_TLS_KEY": made / "gateway.key",
    }
    for name in INSIDE:
        settings |= {
            f"{name.upper()}_HOST": "localhost",
            f"{name.upper()}_TLS_CERTIFICATE": made / f"{name}.crt",
            f"{name.upper()}_TLS_KEY": made / f"{name}.key",
            f"{name.upper()}_TLS_CLIENT_CA": made / "ca.crt",
        }
    receiver = Receiver(certificates.server(made, "jaeger"))
    with start_pipeline(receiver, **{name: str(value) for name, value in settings.items()}) as running:
        yield running
    receiver.stop()


def test_a_request_goes_all_the_way(encrypted, redis):
    """A resumable stream and its trace: gateway, tokenizer, stream, engine, Redis and the collector, all by TLS."""
    with encrypted.client() as client:
        stream = client.stream("Once upon a time", max_tokens=8, ignore_eos=True, resumable=True)
        assert "".join(delta.text for delta in stream) == stream.answer.text
    assert stream.answer.usage.completion_token_count == 8
    assert redis.client.keys("headrace:replay:*")
    wanted = {f"headrace-{name}" for name in PROCESSES}
    spans = encrypted.receiver.wait_for(stream.answer.trace_id, lambda spans: {s.service for s in spans} >= wanted)
    assert {span.service for span in spans} == wanted


@pytest.mark.parametrize("name", INSIDE)
def test_nobody_else_is_let_in(encrypted, made, name):
    """Neither plain text, nor TLS without a certificate, nor with one of another authority; a process' own is taken."""
    address = encrypted.plan.addresses[name]
    other = certificates.make(made.parent / "other")
    key, chain = [(other / f"gateway.{kind}").read_bytes() for kind in ("key", "crt")]
    authority = (made / "ca.crt").read_bytes()
    assert not serves(address)()
    assert not serves(address, grpc.ssl_channel_credentials(authority))()
    assert not serves(address, grpc.ssl_channel_credentials(authority, key, chain))()
    assert serves(address, certificates.caller(made, "tokenizer"))()
