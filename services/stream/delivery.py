"""One delivery: the relays of a request's answers, fed by an engine and emptied by a writer. Knows no gRPC.

News from the engine go in (`on_output`, `on_lost`), a wake-up for the writer comes out. Nothing here blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from headrace import errors
from headrace.v1 import engine_pb2, generation_pb2, stream_pb2
from services.stream import wire
from services.stream.peers import Generation
from services.stream.relay import Relay, RelayStatistics


class Delivery:
    """What one `Deliver` call works with.

    Attributes:
        wake: set when `take` may have something, or the delivery has ended or was lost.
        generation: the engine's side, None before it is opened.
        opened_ns: when the generation was opened, monotonic.
        lost: why the engine's side went away, None while it is there.
    """

    def __init__(
        self,
        relays: Sequence[Relay],
        arrival_ns: int,
        token_bytes: wire.TokenBytes,
        *,
        include_ids: bool,
        resumable: bool = False,
    ) -> None:
        self.wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # rings when pending tokens are due by time
        self.generation: Generation | None = None
        self.opened_ns = time.monotonic_ns()
        self.lost: errors.HeadraceError | None = None
        self._relays = relays
        self._arrival_ns, self._token_bytes, self._include_ids = arrival_ns, token_bytes, include_ids
        self._endings: list[engine_pb2.GenerationEnding | None] = [None] * len(relays)
        self._first_output_ns = 0
        self._first_token: engine_pb2.EngineTimings | None = None
        self._prompt_logprobs: list[generation_pb2.TokenLogprob] = []
        self.send_blocked_ns = self.sent_bytes = 0
        self._resumable = resumable
        self.prompt_token_count: int | None = None  # set where the delivery is resumable
        self.token_ids: list[int] = []  # every token that was made, of a resumable delivery's one answer

    def on_output(self, output: engine_pb2.GenerationOutput) -> None:
        """New tokens or the ending of one answer: into its relay."""
        relay = self._relays[output.index]
        if output.HasField("first_token_timings") and not self._first_output_ns:
            self._first_output_ns = time.monotonic_ns()
            self._first_token = output.first_token_timings
        if output.prompt_logprobs:
            self._prompt_logprobs = list(wire.with_bytes(output.prompt_logprobs, self._token_bytes))
        logprobs = list(wire.with_bytes(output.logprobs, self._token_bytes)) if output.logprobs else ()
        ending = output.ending if output.HasField("ending") else None
        by_token = ending is not None and ending.HasField("matched_token_id")
        stopped = relay.push(output.token_ids, logprobs, ending_token=by_token)
        if self._resumable:
            self.token_ids += output.token_ids
            if ending is not None and relay.matched_stop is None and wire.engine_gave_up(ending):
                self.on_lost(errors.Unavailable("the engine gave the generation up"))
                return
        if ending is not None:
            self._endings[output.index] = ending
            relay.end()
        elif stopped and self.generation is not None:
            self.generation.cancel(output.index)
        self._ring()

    def _ring(self) -> None:
        """Wakes the writer if a message is due, and else when it will be: it sleeps through everything else."""
        due_ns = 0 if self.ended else self.due_in_ns()
        if due_ns == 0:
            self.wake.set()
        elif due_ns is not None and self._timer is None:
            self._timer = self._loop.call_later(due_ns / 1e9, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._ring()  # a timer may come a little early

    @property
    def first_handed_ns(self) -> int:
        """Nanoseconds from the first token to the first message; 0 where there was none."""
        first_sent_ns = self.statistics().first_sent_ns
        return first_sent_ns - self._first_output_ns if first_sent_ns and self._first_output_ns else 0

    def go_on_after(self, token_ids: Sequence[int], text: str, message_count: int) -> None:
        """Takes the state of an earlier delivery that had sent `text` for these tokens."""
        (relay,) = self._relays
        self.token_ids = list(token_ids)
        relay.go_on_after(token_ids, text)
        relay.statistics.message_count = message_count

    def end_if_stopped(self) -> bool:
        """Ends a delivery whose stop string is complete and whose engine cannot say so any more."""
        (relay,) = self._relays
        if relay.matched_stop is None or self.prompt_token_count is None:
            return False
        usage = generation_pb2.Usage(prompt_token_count=self.prompt_token_count)
        self._endings[0] = engine_pb2.GenerationEnding(finish_reason=generation_pb2.FINISH_REASON_STOP, usage=usage)
        relay.end()
        return True

    def on_lost(self, error: errors.HeadraceError) -> None:
        """The engine went away, or the gateway cancelled."""
        self.lost = error
        self.wake.set()

    def take(self) -> stream_pb2.DeliverDelta | None:
        """The next message that is due, None if none is."""
        for index, relay in enumerate(self._relays):
            piece = relay.take()
            if piece is not None:
                delta = wire.delta_of(piece, index, include_ids=self._include_ids)
                self._add_first_token(delta, whole=relay.whole)
                return delta
        return None

    def due_in_ns(self) -> int | None:
        """Nanoseconds until a message is due; None not before more comes from the engine."""
        dues = [due for relay in self._relays if (due := relay.due_in_ns()) is not None]
        return min(dues, default=None)

    @property
    def ended(self) -> bool:
        """Whether every answer has ended; `take` may still have messages."""
        return all(relay.ended for relay in self._relays)

    def statistics(self) -> RelayStatistics:
        """Of all answers together."""
        each = [relay.statistics for relay in self._relays]
        return RelayStatistics(
            first_token_ns=min((s.first_token_ns for s in each if s.first_token_ns), default=0),
            last_token_ns=max(s.last_token_ns for s in each),
            first_sent_ns=min((s.first_sent_ns for s in each if s.first_sent_ns), default=0),
            detokenize_ns=sum(s.detokenize_ns for s in each),
            detokenize_count=sum(s.detokenize_count for s in each),
            message_count=sum(s.message_count for s in each),
            token_count=sum(s.token_count for s in each),
        )

    def final(self) -> stream_pb2.DeliverFinal:
        """The final message. Raises the error that an answer without an ending of its own ended with."""
        endings = [ending for ending in self._endings if ending is not None]
        pairs = enumerate(zip(endings, self._relays, strict=True))
        final = stream_pb2.DeliverFinal(
            endings=[wire.ending_of(ending, relay, index) for index, (ending, relay) in pairs],
            usage=endings[0].usage,
            engine_timings=wire.engine_account(endings),
            prompt_logprobs=self._prompt_logprobs,
        )
        statistics, now = self.statistics(), time.monotonic_ns()
        final.usage.completion_token_count = statistics.token_count
        final.relay_timings.total_ns = now - self._arrival_ns
        final.relay_timings.detokenize_ns = statistics.detokenize_ns
        final.relay_timings.send_blocked_ns = self.send_blocked_ns
        final.relay_timings.tail_ns = now - statistics.last_token_ns
        final.relay_timings.decode_ns = statistics.last_token_ns - statistics.first_token_ns
        final.relay_timings.message_count = statistics.message_count
        return final

    def _add_first_token(self, delta: stream_pb2.DeliverDelta, *, whole: bool) -> None:
        """The first message of all says where the time until then went."""
        engine, self._first_token = self._first_token, None
        if engine is None:
            return
        reached_ns = self._first_output_ns if whole else time.monotonic_ns()
        timings = delta.first_token_timings
        timings.total_ns = reached_ns - self._arrival_ns
        timings.engine_hop_ns = self._first_output_ns - self.opened_ns
        timings.engine_ns = engine.total_ns
        timings.queue_ns = engine.queue_ns
        timings.prefill_ns = engine.prefill_ns
