"""The gateway's small parts: where a request goes, and how a receipt adds up."""

from __future__ import annotations

import pytest

from headrace import errors
from headrace.v1 import engine_pb2, stream_pb2, tokenizer_pb2
from services.gateway.receipt import Stopwatch, stage_timings
from services.gateway.router import Router


def router(*states, model="m"):
    made = Router(tuple(f"e{number}" for number in range(len(states))))
    for engine, serving in zip(made.engines.values(), states, strict=True):
        engine.serving = serving
        engine.facts = engine_pb2.GetEngineResponse(model=model)
    return made


def test_the_least_loaded_serving_engine_is_chosen():
    """Load spreads; an engine that does not serve gets nothing."""
    made = router(True, False, True)
    with made.choose("m") as first, made.choose("m") as second, made.choose("m") as third:
        assert {first.address, second.address} == {"e0", "e2"}
        assert third.address in {"e0", "e2"}
    assert [engine.open_count for engine in made.engines.values()] == [0, 0, 0]


def test_no_serving_engine_is_unavailable():
    """And says when to retry."""
    with pytest.raises(errors.Unavailable), router(False).choose("m"):
        pass


def test_models_by_name():
    """Unset: the only one. Unknown: NOT_FOUND with what is served. Nothing known yet: UNAVAILABLE."""
    made = router(True)
    assert made.facts("").model == made.facts("m").model == "m"
    with pytest.raises(errors.NotFound, match="expected one of: m"):
        made.facts("other")
    with pytest.raises(errors.Unavailable):
        Router(("e",)).facts("")


def accounts(decode_ns):
    encode = tokenizer_pb2.EncodeTimings(total_ns=50, wait_ns=10, encode_ns=30)
    first = stream_pb2.FirstTokenTimings(total_ns=1000, engine_hop_ns=900, engine_ns=800, queue_ns=100, prefill_ns=600)
    final = stream_pb2.DeliverFinal()
    final.engine_timings.decode_ns = decode_ns
    final.relay_timings.total_ns = 1000 + decode_ns + 70
    final.relay_timings.tail_ns = 70
    final.relay_timings.decode_ns = 100 + decode_ns  # the last token was longer on its way from the engine
    return encode, first, final


def test_a_streamed_receipt_sums():
    """Stages sum to the time to first token, and with decode, its delivery and tail to the whole."""
    encode, first, final = accounts(5000)
    watch = Stopwatch(
        arrived=0, admitted=20, encoded=100, routed=105, first_received=1205, first_sent=1225, final_received=6285,
        finished=6300,
    )  # fmt: skip
    timings = stage_timings(watch, encode, first, final, whole=False)
    assert timings.transit_ns == (80 - 50) + (1100 - 1000) + (900 - 800)
    assert timings.first_delivery_ns == (800 - 700) + (1000 - 900) + 20
    stages = 20 + 50 + 5 + timings.transit_ns + 100 + 600 + timings.first_delivery_ns
    assert stages == timings.time_to_first_token_ns == 1225
    assert timings.tail_ns == 70 + 15
    # 100 longer to the stream process, 10 longer from there; the first token's 100 + 20 of handing on overlap decoding
    assert timings.decode_delivery_ns == 100 + 10 - 120
    assert timings.residual_ns == 6300 - 1225 - 5000 + 10 - 85 == 0


def test_a_whole_receipt_does_not_count_decode_twice():
    """An answer sent at once: its first token's time is when it reached the stream process."""
    encode, first, final = accounts(5000)
    final.relay_timings.decode_ns = 5000  # the first token was in the stream process after 1000
    watch = Stopwatch(
        arrived=0, admitted=20, encoded=100, routed=105, first_received=6275, first_sent=6280, final_received=6285,
        finished=6300,
    )  # fmt: skip
    timings = stage_timings(watch, encode, first, final, whole=True)
    hop = 6285 - 105 - final.relay_timings.total_ns
    assert timings.transit_ns == 30 + hop + 100
    assert timings.time_to_first_token_ns < 1500
    assert timings.decode_delivery_ns == 0
    later = timings.decode_ns + timings.decode_delivery_ns + timings.tail_ns
    total = timings.time_to_first_token_ns + later + timings.residual_ns
    assert total == timings.total_ns == 6300
    assert abs(timings.residual_ns) < 50


def test_token_ids_need_no_tokenizer():
    """Nothing was encoded: no tokenize stage, and no transit for it."""
    _, first, final = accounts(10)
    watch = Stopwatch(
        arrived=0, admitted=20, encoded=20, routed=25, first_received=1030, first_sent=1031, final_received=1120,
        finished=1121,
    )  # fmt: skip
    timings = stage_timings(watch, None, first, final, whole=False)
    assert timings.tokenize_ns == 0
    assert timings.transit_ns == 5 + 100


def test_places_are_a_share_of_the_knees():
    """Of each serving engine's measured knee, or of the sequences that it runs where those are fewer."""
    made = router(True, True, False)
    for engine, sequences in zip(made.engines.values(), (32, 8, 32), strict=True):
        engine.facts.max_num_seqs = sequences
    assert made.sequence_count() == 40
    assert made.sequence_count(knee=20) == 28
