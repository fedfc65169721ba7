"""Two engines behind one gateway: prefixes find their engine, and one of them may die."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from headrace import Client, errors
from headrace.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2_grpc
from tests.pipeline.conftest import until
from tests.pipeline.gateways import start_gateway, start_process
from tests.pipeline.test_session import Session, opening


@contextlib.contextmanager
def another_engine(random_model):
    settings = {"MODEL": str(random_model), "ENGINE_DTYPE": "float32", "ENGINE_KV_BLOCKS": "4096"}
    with start_process("engine", **settings) as engine:
        yield engine


def both(tiny_pipeline, engine) -> dict[str, str]:
    return {"GATEWAY_ENGINE_ADDRESSES": f"{tiny_pipeline.plan.addresses['engine']},{engine.address}"}


def all_serve(client) -> bool:
    return all(engine.reachable and engine.model for engine in client.get_stats().engines)


def shared_prefix_traffic(client) -> float:
    """Share of prompt tokens found in a prefix cache, of conversations that grow over shared beginnings."""
    draw = random.Random(11)
    talks = [[5000 + 300 * (number % 4) + place for place in range(160)] + [number] for number in range(12)]
    asked = cached = 0
    for _ in range(60):
        talk = draw.choice(talks)
        usage = client.generate(token_ids=talk, max_tokens=1, ignore_eos=True).usage
        asked, cached = asked + usage.prompt_token_count, cached + usage.cached_token_count
        talk.extend(draw.choices(range(300, 40_000), k=20))
    return cached / asked


def test_prefixes_find_their_engine(tiny_pipeline, random_model):
    """The hit ratio over two engines is at least 90 % of that of one."""
    tiny_pipeline.flush_prefix_cache()
    with tiny_pipeline.client() as client:
        alone = shared_prefix_traffic(client)
    tiny_pipeline.flush_prefix_cache()
    with (
        another_engine(random_model) as engine,
        start_gateway(tiny_pipeline, **both(tiny_pipeline, engine)) as gateway,
        gateway.client() as client,
    ):
        until(lambda: all_serve(client), 10, "both engines serve")
        together = shared_prefix_traffic(client)
        decoded = [engine.stats.decoded_token_count for engine in client.get_stats().engines]
    assert alone > 0.5
    assert together >= 0.9 * alone
    assert min(decoded) > 0


def test_an_engine_dies_under_load(tiny_pipeline, random_model):
    """Who has not had a token is answered by the other; only streams past their first token fail, with a reason."""
    with another_engine(random_model) as engine, start_gateway(tiny_pipeline, **both(tiny_pipeline, engine)) as gateway:
        client = gateway.client()
        until(lambda: all_serve(client), 10, "both engines serve")
        started, stop = threading.Semaphore(0), threading.Event()
        outcomes: list[str] = []

        def whole(number: int) -> None:
            while not stop.is_set():
                try:
                    client.generate(f"Tell me {number}", max_tokens=60, ignore_eos=True)
                    outcomes.append("ok")
                except errors.HeadraceError as error:
                    outcomes.append(f"whole: {error.reason}")

        def streamed(number: int) -> None:
            while not stop.is_set():
                seen = 0
                try:
                    for delta in client.stream(f"Once {number}", max_tokens=400, ignore_eos=True):
                        seen += delta.token_count
                        started.release()
                except errors.Unavailable:
                    outcomes.append("late" if seen else "stream: nothing received")
                else:
                    outcomes.append("ok")

        with ThreadPoolExecutor(12) as threads:
            running = [threads.submit(work, number) for number in range(6) for work in (whole, streamed)]
            for _ in range(50):
                assert started.acquire(timeout=30)
            engine.supervisor.stop(at_once=True)
            before = len(outcomes)
            until(lambda: len(outcomes) > before + 30, 60, "it goes on with one engine")
            stop.set()
            for one in running:
                one.result()
        client.close()
    assert set(outcomes) <= {"ok", "late"}
    assert outcomes.count("ok") > 30


def test_a_session_moves_before_its_first_token(tiny_pipeline, random_model):
    """Held by an engine that computes nothing and then dies: another goes on, with all credits that came meanwhile."""
    with another_engine(random_model) as engine, start_gateway(tiny_pipeline, **both(tiny_pipeline, engine)) as gateway:
        client = gateway.client()
        until(lambda: all_serve(client), 10, "both engines serve")
        with grpc.insecure_channel(engine.address) as channel:
            engine_pb2_grpc.EngineServiceStub(channel).Pause(engine_pb2.EngineServicePauseRequest())
        with grpc.insecure_channel(gateway.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            sessions = [Session(stub, opening(4, max_tokens=20, resumable=False)) for _ in range(4)]

            def held() -> int:
                states = {state.address: state.stats for state in client.get_stats().engines}
                return states[engine.address].open_stream_count

            until(lambda: held() >= 1, 10, "one waits on the engine that does nothing")
            for session in sessions:
                session.grant(16)
            engine.supervisor.stop(at_once=True)
            for session in sessions:
                assert session.read().messages[-1].final.usage.completion_token_count == 20
        client.close()


def test_tenants_share_an_engine(tiny_pipeline, tmp_path):
    """120 requests of one tenant wait in the engine, then comes one of another: it is among the first that start."""
    entries = {tenant: hashlib.sha256(tenant.encode()).hexdigest() for tenant in ("flood", "quiet")}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"sha256": digest, "tenant": name} for name, digest in entries.items()]}))
    with (
        start_gateway(tiny_pipeline, GATEWAY_KEYS_FILE=str(keys)) as gateway,
        grpc.insecure_channel(tiny_pipeline.plan.addresses["engine"]) as channel,
        ThreadPoolExecutor(121) as threads,
    ):
        engine = engine_pb2_grpc.EngineServiceStub(channel)
        flood, quiet = (gateway.client(headers={"authorization": f"Bearer {name}"}) for name in entries)
        engine.Pause(engine_pb2.EngineServicePauseRequest())
        try:
            running = [threads.submit(flood.generate, "x", max_tokens=200, ignore_eos=True) for _ in range(120)]
            until(lambda: quiet.get_stats().engines[0].stats.waiting_count == 120, 30, "the flood waits")
            late = threads.submit(quiet.generate, "x", max_tokens=1, ignore_eos=True)
            until(lambda: quiet.get_stats().engines[0].stats.waiting_count == 121, 30, "the other waits")
        finally:
            engine.Resume(engine_pb2.EngineServiceResumeRequest())
        late.result()
        assert sum(one.done() for one in running) <= 32
        for one in running:
            one.result()
        flood.close()
        quiet.close()


def test_a_gateway_dies_under_load(tiny_pipeline):
    """Clients that know both go on with the other; only streams past their first token and not resumable fail."""
    with start_gateway(tiny_pipeline) as doomed, start_gateway(tiny_pipeline) as other:
        client = Client(f"ipv4:{doomed.address},{other.address}", retries=6)
        outcomes: list[str] = []
        lock, stop = threading.Lock(), threading.Event()

        def note(outcome: str) -> None:
            with lock:
                outcomes.append(outcome)

        def ask(number: int) -> None:
            while not stop.is_set():
                seen, resumable = 0, number % 3 == 2
                try:
                    if number % 3 == 0:
                        client.generate("Tell me", max_tokens=60, ignore_eos=True)
                    else:
                        for delta in client.stream("Once", max_tokens=200, ignore_eos=True, resumable=resumable):
                            seen += delta.token_count
                except errors.HeadraceError as error:
                    note("late" if seen and not resumable else f"{number % 3}: {error.reason} {error.message}")
                else:
                    note("ok")

        with ThreadPoolExecutor(9) as threads:
            running = [threads.submit(ask, number) for number in range(9)]
            until(lambda: len(outcomes) > 9, 60, "it runs")
            doomed.supervisor.stop(at_once=True)
            before = len(outcomes)
            until(lambda: len(outcomes) > before + 30, 60, "it goes on with one gateway")
            stop.set()
            for one in running:
                one.result()
        client.close()
    assert set(outcomes) <= {"ok", "late"}


def test_engines_register_themselves(tiny_pipeline, random_model, redis_server):
    """Found when they come, left when they have gone, and requests go on meanwhile."""
    settings = {"MODEL": str(random_model), "ENGINE_DTYPE": "float32", "ENGINE_KV_BLOCKS": "4096"}
    settings |= {"REDIS_URL": redis_server.url, "ENGINE_ADVERTISE": "127.0.0.1:{port}"}
    finding = {"REDIS_URL": redis_server.url, "GATEWAY_ENGINES_IN_REDIS": "true", "GATEWAY_ENGINE_ADDRESSES": ""}
    with start_process("engine", **settings) as first, start_gateway(tiny_pipeline, **finding) as gateway:
        client = gateway.client()
        assert [engine.address for engine in client.get_stats().engines] == [first.address]
        with start_process("engine", **settings) as second:
            addresses = {first.address, second.address}
            until(lambda: {e.address for e in client.get_stats().engines} == addresses, 10, "it is found")
            until(lambda: all_serve(client), 10, "both serve")
            first.supervisor.stop(grace_s=10)
            assert client.generate("x", max_tokens=1, timeout=10).usage.completion_token_count == 1
            until(lambda: len(client.get_stats().engines) == 1, 20, "the first is left")
            assert client.generate("x", max_tokens=1, timeout=10).usage.completion_token_count == 1
        client.close()


def test_one_engine_alone_is_not_tried_twice(tiny_pipeline, random_model):
    """Nothing to go to: the caller hears at once that it is lost."""
    with (
        another_engine(random_model) as engine,
        start_gateway(tiny_pipeline, GATEWAY_ENGINE_ADDRESSES=engine.address) as gateway,
        gateway.client() as client,
    ):
        assert client.generate("x", max_tokens=1).usage.completion_token_count == 1
        engine.supervisor.stop(at_once=True)
        with pytest.raises(errors.Unavailable):
            client.generate("x", max_tokens=1, timeout=10)
