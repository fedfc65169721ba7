"""Every metric, with kind, unit, labels and meaning. Knows no library: `metrics` makes instruments of these.

Names are in OpenTelemetry's spelling, standard ones first (`gen_ai.*`, `rpc.*`, `process.*`; pinned in `names`).
Prometheus' spelling follows from name, unit and kind: `headrace.step.duration`, seconds, a histogram, is scraped as
`headrace_step_duration_seconds_bucket`, `_sum` and `_count`. Labels have few values by construction: never an id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SECONDS = "s"
BYTES = "By"
RATIO = "1"
COUNT = ""  # of what the name says
_SUFFIXES = {SECONDS: "_seconds", BYTES: "_bytes", RATIO: "_ratio", COUNT: ""}

# Bucket bounds that the semantic conventions ask for.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CALL = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# Ours.
_SHORT = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

PROMPT_LENGTHS = (128, 512, 2048, 8192)  # upper bounds of the length buckets that requests are told apart by


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name in Prometheus' spelling, without `_total` and the like."""
        base = self.name.replace(".", "_")
        suffix = _SUFFIXES[self.unit]
        return base if base.endswith(suffix) else base + suffix

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which it is scraped."""
        ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(self.prometheus + end for end in ends[self.kind])


def length_bucket(token_count: int) -> str:
    """The label value for a prompt of so many tokens: "<=512"."""
    return next((f"<={bound}" for bound in PROMPT_LENGTHS if token_count <= bound), f">{PROMPT_LENGTHS[-1]}")


def _counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", unit, meaning, labels)


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, meaning, labels)


def _histogram(name: str, unit: str, buckets: tuple[float, ...], meaning: str, *labels: str) -> Metric:
    return Metric(name, "histogram", unit, meaning, labels, buckets)


# --- service: what callers get (gateway) --------------------------------------------------------------

REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    SECONDS,
    _DURATION,
    "Arrival to final message",
    "gen_ai_operation_name",
    "gen_ai_request_model",
    "error_type",
    "prompt_length",  # "": unknown, of requests that failed
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    SECONDS,
    _FIRST_TOKEN,
    "Arrival to first token",
    "gen_ai_operation_name",
    "gen_ai_request_model",
    "prompt_length",
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    SECONDS,
    _PER_TOKEN,
    "Decode time per token after the first",
    "gen_ai_operation_name",
    "gen_ai_request_model",
    "prompt_length",
)
STAGE_DURATION = _histogram(
    "headrace.stage.duration", SECONDS, _SHORT, "Each stage of the receipt, of requests that ended well", "stage"
)
REQUESTS = _counter(
    "headrace.requests", COUNT, "Requests by how they ended: finish reason or error reason", "method", "outcome"
)
REQUESTS_OPEN = _gauge("headrace.requests.open", COUNT, "Requests inside the gateway")
REQUESTS_QUEUED = _gauge("headrace.requests.queued", COUNT, "Requests that wait for a place", "priority")
REQUESTS_OPEN_LIMIT = _gauge("headrace.requests.open.limit", COUNT, "Most requests that the gateway takes at once")
ENGINE_SERVING = _gauge("headrace.engine.serving", COUNT, "1 while the gateway routes to the engine, else 0", "engine")
ENGINE_REQUESTS = _gauge("headrace.engine.requests", COUNT, "Requests that the gateway has on the engine", "engine")

# --- business (gateway) -------------------------------------------------------------------------------

TOKENS = _counter(
    "headrace.tokens", COUNT, "Tokens: prompt (cached ones included), cached, completion", "tenant", "method", "kind"
)
QUOTA_REFUSED = _counter("headrace.quota.refused", COUNT, "Requests over a limit of their key", "tenant", "limit")
SHARED_STATE_REACHABLE = _gauge("headrace.shared_state.reachable", COUNT, "1 while Redis answers; 0: local limits")
PRICE = _gauge("headrace.price.hourly", COUNT, "What the pipeline costs an hour, as set; 0: not set")

# --- service: the other processes ---------------------------------------------------------------------

CALL_DURATION = _histogram(
    "rpc.server.call.duration", SECONDS, _CALL, "Calls that ended", "rpc_method", "rpc_response_status_code"
)
CALLS_OPEN = _gauge("headrace.calls.open", COUNT, "Calls at work")
TOKENIZER_WAIT = _histogram("headrace.tokenizer.wait", SECONDS, _SHORT, "Waiting for a batch, of one input")
TOKENIZER_ENCODE = _histogram("headrace.tokenizer.encode", SECONDS, _SHORT, "Rendering and encoding one batch")
TOKENIZER_BATCH = _histogram("headrace.tokenizer.batch.size", COUNT, _POWERS, "Inputs encoded together")
TOKENIZER_WAITING = _gauge("headrace.tokenizer.waiting", COUNT, "Inputs that wait or are being encoded")
TOKENIZER_TOKENS = _counter("headrace.tokenizer.tokens", COUNT, "Tokens encoded")
STREAM_OPEN = _gauge("headrace.stream.open", COUNT, "Deliveries that have not ended")
STREAM_MESSAGES = _counter("headrace.stream.messages", COUNT, "Messages sent to gateways, of deliveries that ended")
STREAM_TOKENS = _counter("headrace.stream.tokens", COUNT, "Tokens turned into text, of deliveries that ended")
STREAM_DETOKENIZE = _counter("headrace.stream.detokenize", SECONDS, "Busy turning tokens into text")
STREAM_BLOCKED = _counter("headrace.stream.blocked", SECONDS, "Blocked in writes: the gateway took nothing")
STREAM_ENGINES_LOST = _counter("headrace.stream.engines.lost", COUNT, "Attachments that an engine ended")

# --- runtime (engine) ---------------------------------------------------------------------------------

STEP_DURATION = _histogram("headrace.step.duration", SECONDS, _STEP, "One step, schedule to publish", "kind")
STEP_SEQUENCES = _histogram("headrace.step.sequences", COUNT, _POWERS, "Sequences in a step")
STEP_TOKENS = _histogram("headrace.step.tokens", COUNT, _TOKENS, "Tokens of a step: prefill, decode, draft", "kind")
HOST_GAP = _histogram(
    "headrace.host.gap", SECONDS, _SHORT, "From one step's computing to the next one's, while there was work"
)
INTER_TOKEN = _histogram(
    "headrace.inter_token.duration",
    SECONDS,
    _STEP,
    "Gap between two tokens of an answer, of requests that ended",
    "prompt_length",
)
QUEUE_DURATION = _histogram(
    "headrace.queue.duration", SECONDS, _SHORT, "In the engine's queue, by what was lacking last", "reason"
)
STALLED = _counter("headrace.stalled", SECONDS, "Decode time owed to other requests' prefill")
PAUSED = _counter("headrace.paused", SECONDS, "Time in which readers had granted no credits")
PREEMPTED = _counter("headrace.preempted", SECONDS, "Time between preemption and being scheduled again")
PREEMPTIONS = _counter("headrace.preemptions", COUNT, "Running requests that lost their blocks")
RECOMPUTED = _counter("headrace.recomputed.tokens", COUNT, "Tokens computed again because of preemptions")
DRAFTED = _counter("headrace.drafted.tokens", COUNT, "Tokens guessed by lookup and computed ahead")
ACCEPTED = _counter("headrace.accepted.tokens", COUNT, "Of those, became output")
SEQUENCES = _gauge("headrace.sequences", COUNT, "Requests in the engine: running, waiting, paused", "state")
SEQUENCES_LIMIT = _gauge("headrace.sequences.limit", COUNT, "Most sequences in a step")
BACKLOG = _gauge("headrace.backlog.tokens", COUNT, "Known tokens of waiting requests that are not computed")
KV_BLOCKS = _gauge("headrace.kv.blocks", COUNT, "KV blocks: used, cached (free, with a name), free (empty)", "state")
KV_TOKENS_PER_BLOCK = _gauge("headrace.kv.block.tokens", COUNT, "Tokens in a block")
KV_WASTED = _gauge("headrace.kv.wasted.tokens", COUNT, "Places in the last blocks of requests that hold no token")
PREFIX_QUERIED = _counter("headrace.prefix.queried.tokens", COUNT, "Prompt tokens looked up in the prefix cache")
PREFIX_HIT = _counter("headrace.prefix.hit.tokens", COUNT, "Of those, found")
MODEL_MEMORY = _gauge(
    "headrace.model.memory", BYTES, "Memory of the model: weights, kv, activations (peak of the largest step)", "part"
)
ALLOCATOR_MEMORY = _gauge(
    "headrace.allocator.memory",
    BYTES,
    "Of the allocator: reserved, allocated of that, largest_free (block; only where it is known)",
    "state",
)

# --- GPUs (engine, where there are any; by their number) ------------------------------------------------

GPU_UTILIZATION = _gauge("hw.gpu.utilization", RATIO, "Share of the last moments in which a kernel ran", "gpu")
GPU_MEMORY = _gauge("hw.gpu.memory.usage", BYTES, "Memory of the GPU that is taken, by whomever", "gpu")
GPU_MEMORY_LIMIT = _gauge("hw.gpu.memory.limit", BYTES, "Memory of the GPU", "gpu")
GPU_CLOCK = _gauge("headrace.gpu.clock.hertz", COUNT, "Clock of the GPU's processors", "gpu")
GPU_POWER = _gauge("headrace.gpu.power.watts", COUNT, "Power that the GPU draws", "gpu")
GPU_THROTTLED = _gauge(
    "headrace.gpu.throttled", COUNT, "1 while its clocks are held down: by power, heat, hardware", "gpu", "cause"
)

# --- process and machine (every process) --------------------------------------------------------------

CPU_TIME = _counter("process.cpu.time", SECONDS, "Processor time of the process", "cpu_mode")
MEMORY = _gauge("process.memory.usage", BYTES, "Resident memory of the process")
THREADS = _gauge("process.thread.count", COUNT, "Threads of the process")
LOOP_LAG = _histogram("headrace.loop.lag", SECONDS, _SHORT, "Time until the event loop took up a call, once a second")
PRESSURE = _gauge(
    "headrace.machine.pressure", RATIO, "Share of the last 10 s in which some task waited for it", "resource"
)
STEAL = _counter("headrace.machine.steal", SECONDS, "Processor time that other machines on the host took")

# --- telemetry itself (every process) -----------------------------------------------------------------

SPANS_STARTED = _counter("headrace.spans.started", COUNT, "Spans that are or will be exported")
SPANS_ENDED = _counter("headrace.spans.ended", COUNT, "Of those, ended")
SPANS_EXPORTED = _counter("headrace.spans.exported", COUNT, "Spans that the collector took")
SPANS_DROPPED = _counter("headrace.spans.dropped", COUNT, "Spans lost: queue full, or not taken")
LOGS_WRITTEN = _counter("headrace.logs.written", COUNT, "Log lines written")
LOGS_DROPPED = _counter("headrace.logs.dropped", COUNT, "Log lines lost: queue full")
LOGS_SAMPLED_OUT = _counter("headrace.logs.sampled_out", COUNT, "Lines of requests that were not chosen")

ALL: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
