"""What the end of a request means to metrics and to the access log. Knows no gRPC.

Every number comes from the receipt or from the gateway's own moments, so none depends on sampling. The access log has
one line a request: ids, counts and durations; never a prompt, an answer or metadata of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import Reason
from headrace.v1 import gateway_pb2, generation_pb2, timings_pb2
from services.common import metric_names as names
from services.common.logs import Log
from services.common.metrics import Metrics
from services.gateway.admission import Admission
from services.gateway.identity import ANONYMOUS_TENANT
from services.gateway.receipt import Stopwatch
from services.gateway.router import Router

STAGES = (
    "admit",
    "tokenize",
    "route",
    "transit",
    "queue",
    "prefill",
    "first_delivery",
    "decode",
    "decode_delivery",
    "tail",
)
OURS = frozenset({Reason.INTERNAL, Reason.PEER_LOST, Reason.STARTING, Reason.SHUTTING_DOWN})  # faults of the service
PRIORITIES = {name.removeprefix("PRIORITY_").lower(): n for name, n in generation_pb2.Priority.items() if n}


@dataclass(slots=True)
class Subject:
    """What is known of a request besides its times; filled in as it goes."""

    method: str = ""  # Generate, GenerateStream or GenerateSession
    operation: str = ""  # chat or text_completion
    model: str = ""  # one that is served; "" before that is checked
    tenant: str = ANONYMOUS_TENANT
    answer: gateway_pb2.Final | None = None


class Accounts:
    """Counts requests as they end."""

    def __init__(self, metrics: Metrics, log: Log, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._metrics, self._log, self._now = metrics, log, now

    def begin(self, router: Router, admission: Admission, price_hourly: float) -> None:
        """Has what is going on told once a second."""
        metrics = self._metrics
        metrics.set(names.PRICE, price_hourly)

        def sample() -> None:
            metrics.set(names.REQUESTS_OPEN, admission.open_count)
            metrics.set(names.REQUESTS_OPEN_LIMIT, admission.places)
            for name, number in PRIORITIES.items():
                metrics.set(names.REQUESTS_QUEUED, admission.queued(number), name)
            for engine in list(router.engines.values()):
                metrics.set(names.ENGINE_SERVING, engine.serving, engine.address)
                metrics.set(names.ENGINE_REQUESTS, engine.open_count, engine.address)

        metrics.each_second(sample)

    def ended(self, subject: Subject, watch: Stopwatch, *, request_id: str, trace_id: str, reason: str) -> None:
        """A request has ended.

        Args:
            subject: what is known of it.
            watch: its moments.
            request_id: the server's own id.
            trace_id: of its trace; the exemplar.
            reason: of the error that it ended with; "" if it ended well.
        """
        answer = subject.answer if not reason else None
        outcome = reason or _finish(answer)
        duration_ns = (watch.finished if answer is not None and watch.finished else self._now()) - watch.arrived
        self._metrics.add(names.REQUESTS, 1, subject.method, outcome)
        length = names.length_bucket(answer.usage.prompt_token_count) if answer is not None else ""
        labels = (subject.operation, subject.model, reason, length)
        self._metrics.observe(names.REQUEST_DURATION, duration_ns / 1e9, *labels, trace_id=trace_id)
        if answer is not None:
            self._count_answer(subject, answer, trace_id)
        usage, timings = (answer.usage, answer.timings) if answer is not None else (None, None)
        say = self._log.warning if reason in OURS else self._log.info
        say(
            "request",
            request_id=request_id,
            trace_id=trace_id,
            method=subject.method,
            model=subject.model,
            outcome=outcome,
            prompt_tokens=usage.prompt_token_count if usage is not None else None,
            cached_tokens=usage.cached_token_count if usage is not None else None,
            completion_tokens=usage.completion_token_count if usage is not None else None,
            first_token_ms=round(timings.time_to_first_token_ns / 1e6, 2) if timings is not None else None,
            total_ms=round(duration_ns / 1e6, 2),
        )

    def _count_answer(self, subject: Subject, answer: gateway_pb2.Final, trace_id: str) -> None:
        metrics, usage, timings = self._metrics, answer.usage, answer.timings
        for kind, count in (
            ("prompt", usage.prompt_token_count),
            ("cached", usage.cached_token_count),
            ("completion", usage.completion_token_count),
        ):
            metrics.add(names.TOKENS, count, subject.tenant, subject.method, kind)
        if timings.resume_count:  # the earlier stages were another call's
            return
        labels = (subject.operation, subject.model, names.length_bucket(usage.prompt_token_count))
        first_s = timings.time_to_first_token_ns / 1e9
        metrics.observe(names.TIME_TO_FIRST_TOKEN, first_s, *labels, trace_id=trace_id)
        later = max((ending.completion_token_count for ending in answer.endings), default=0) - 1
        if later > 0:
            metrics.observe(names.TIME_PER_OUTPUT_TOKEN, timings.decode_ns / later / 1e9, *labels, trace_id=trace_id)
        for stage in STAGES:
            metrics.observe(names.STAGE_DURATION, _seconds(timings, stage), stage, trace_id=trace_id)


def _seconds(timings: timings_pb2.StageTimings, stage: str) -> float:
    return float(max(0, getattr(timings, f"{stage}_ns")) / 1e9)


def _finish(answer: gateway_pb2.Final | None) -> str:
    if answer is None or not answer.endings:
        return "unknown"
    return generation_pb2.FinishReason.Name(answer.endings[0].finish_reason).removeprefix("FINISH_REASON_").lower()
