"""The admin port: its verbs do what they say, its door is its own, and it shows no secret."""

from __future__ import annotations

import json
import threading

import grpc
import pytest

from headrace import errors
from headrace.answers import error_of as error_of_call
from headrace.cli import ports
from headrace.cli.supervisor import ProgramDied
from headrace.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.pipeline.conftest import until
from tests.pipeline.gateways import start_gateway, start_process

TOKEN = (("authorization", "Bearer operators-only"),)


@pytest.fixture(scope="module")
def place(tiny_pipeline, random_model):
    """A gateway with an admin port, and an engine of its own."""
    settings = {"MODEL": str(random_model), "ENGINE_DTYPE": "float32", "ENGINE_KV_BLOCKS": "4096"}
    port = ports.free("127.0.0.1", 1)[0]
    admin_settings = {"GATEWAY_ADMIN_PORT": str(port), "GATEWAY_ADMIN_TOKEN": "operators-only"}
    with (
        start_process("engine", **settings) as engine,
        start_gateway(tiny_pipeline, GATEWAY_ENGINE_ADDRESSES=engine.address, **admin_settings) as gateway,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield gateway, engine, admin_pb2_grpc.AdminServiceStub(channel)


def failure(call) -> errors.HeadraceError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_of_call(caught.value)


def test_the_door_is_its_own(place):
    """Without the token nothing is done; the public port has no such service, and the admin port no other."""
    gateway, _, admin = place
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "operators-only"),)):
        refused = failure(lambda given=metadata: admin.Pause(admin_pb2.PauseRequest(), metadata=given, timeout=5))
        assert isinstance(refused, errors.Unauthenticated)
    with grpc.insecure_channel(gateway.address) as channel:
        public = admin_pb2_grpc.AdminServiceStub(channel)
        unknown = failure(lambda: public.GetConfiguration(admin_pb2.GetConfigurationRequest(), metadata=TOKEN))
    assert unknown.code == grpc.StatusCode.UNIMPLEMENTED.value[0]


def test_no_secret_is_shown(place):
    """The configuration in force, by name."""
    _, _, admin = place
    shown = admin.GetConfiguration(admin_pb2.GetConfigurationRequest(), metadata=TOKEN).settings
    assert shown["HEADRACE_GATEWAY_ADMIN_TOKEN"] == "(hidden)"
    assert shown["HEADRACE_GATEWAY_MAX_OPEN_REQUESTS"] == "256"
    assert "operators-only" not in str(shown)


def test_a_wrong_engine_is_named(place):
    """With what there is."""
    _, engine, admin = place
    for call in (
        lambda: admin.Pause(admin_pb2.PauseRequest(engine_address="nowhere:1"), metadata=TOKEN),
        lambda: admin.Drain(admin_pb2.DrainRequest(engine_address="nowhere:1"), metadata=TOKEN),
    ):
        refused = failure(call)
        assert (refused.field, refused.code) == ("engine_address", grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert engine.address in refused.message
    for count in (0, -1, 10_001):
        asked = admin_pb2.ProfileRequest(engine_address=engine.address, step_count=count)
        assert failure(lambda asked=asked: admin.Profile(asked, metadata=TOKEN)).field == "step_count"


def test_paused_and_resumed(place):
    """Nothing is computed between, nothing is lost, and the answer is the same."""
    gateway, _, admin = place
    with gateway.client() as client:
        wanted = client.generate("Once", max_tokens=50, ignore_eos=True, temperature=0).text
        admin.Pause(admin_pb2.PauseRequest(), metadata=TOKEN)
        answers: list[str] = []
        asking = threading.Thread(
            target=lambda: answers.append(client.generate("Once", max_tokens=50, ignore_eos=True, temperature=0).text)
        )
        asking.start()
        until(lambda: client.get_stats().engines[0].stats.open_stream_count == 1, 10, "it has come to the engine")
        with pytest.raises(errors.DeadlineExceeded):
            client.generate("x", max_tokens=1, timeout=0.3)
        assert not answers
        admin.Resume(admin_pb2.ResumeRequest(), metadata=TOKEN)
        asking.join(20)
        assert answers == [wanted]


def test_flushed(place):
    """The next request finds nothing of its prefix."""
    gateway, engine, admin = place
    ids = list(range(500, 800))
    with gateway.client() as client:
        client.generate(token_ids=ids, max_tokens=1)
        assert client.generate(token_ids=ids, max_tokens=1).usage.cached_token_count > 0
        flush = admin_pb2.FlushPrefixCacheRequest(engine_address=engine.address)
        assert admin.FlushPrefixCache(flush, metadata=TOKEN).flushed_block_count > 10
        assert client.generate(token_ids=ids, max_tokens=1).usage.cached_token_count == 0


def test_a_profile_is_a_chrome_trace(place):
    """The next steps, with each request's part in them."""
    gateway, engine, admin = place
    asked = admin_pb2.ProfileRequest(engine_address=engine.address, step_count=20)
    recording = admin.Profile.future(asked, metadata=TOKEN, timeout=20)
    with gateway.client() as client:
        while not recording.done():
            client.generate("Once", max_tokens=20, ignore_eos=True)
    events = json.loads(recording.result().chrome_trace)["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    assert len(steps) == 20
    assert all(event["dur"] > 0 for event in steps)
    assert {"prefill", "decode"} <= {event["name"] for event in events}


def test_z_drained(place):
    """It loses no stream, takes no new one, and then its process ends well."""
    gateway, engine, admin = place
    with grpc.insecure_channel(gateway.address) as channel, gateway.client() as client:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GenerateStreamRequest(
            generation={"prompt": "Once", "max_tokens": 800, "stop": {"ignore_eos": True}}
        )
        stream = stub.GenerateStream(request)
        next(stream)
        drained = admin.Drain(admin_pb2.DrainRequest(engine_address=engine.address), metadata=TOKEN)
        assert drained.open_stream_count == 1
        with pytest.raises(errors.Unavailable):
            client.generate("x", max_tokens=1, timeout=10)
        assert list(stream)[-1].final.usage.completion_token_count == 800
        with pytest.raises(ProgramDied):
            engine.supervisor.wait(20)
