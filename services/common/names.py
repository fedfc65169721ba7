"""Every span, attribute and metric name, with unit and meaning. Knows no SDK.

Standard names come first (OpenTelemetry semantic conventions, pinned below); ours are under `headrace.*`. Metrics are
in `metric_names`.
"""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"

# Spans: RPC spans are named by their full method; the rest are phases of one request.
SPAN_PROBE = "gateway.probe"  # the generation that must succeed before the gateway serves
SPAN_ADMIT = "gateway.admit"  # validation and the admission queue
SPAN_ROUTE = "gateway.route"  # choosing an engine
SPAN_TOKENIZER_WAIT = "tokenizer.wait"  # waiting for a batch
SPAN_TOKENIZER_ENCODE = "tokenizer.encode"  # rendering and encoding
SPAN_TOKENIZER_BATCH = "tokenizer.batch"  # several inputs encoded together; a trace of its own, linked to each
SPAN_ENGINE_REQUEST = "engine.request"  # one generation in the engine, arrival to ending
SPAN_ENGINE_QUEUE = "engine.queue"  # arrival to the first step
SPAN_ENGINE_PREFILL = "engine.prefill"  # first step to the first sampled token
SPAN_ENGINE_DECODE = "engine.decode"  # first to last sampled token
SPAN_ENGINE_PREEMPTED = "engine.preempted"  # lost its blocks, until it was scheduled again
SPAN_ENGINE_PAUSED = "engine.paused"  # the reader had granted no credits
SPAN_ENGINE_STEP = "engine.step"  # one step; a trace of its own, linked to the phase of each request in it
SPAN_STREAM_DETOKENIZE = "stream.detokenize"  # token ids to text, from the first token to the last
SPAN_STREAM_SEND = "stream.send"  # messages to the gateway, from the first delta to the end

# Attributes of the root span (gen_ai.*: semantic conventions of generative AI).
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"  # "chat" or "text_completion"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"  # tokens
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"  # the server's own request id
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"  # tokens
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"  # tokens

# Attributes of RPC spans.
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"  # full method name
RPC_STATUS = "rpc.response.status_code"  # name of the gRPC status
ERROR_TYPE = "error.type"  # reason of the error catalogue

# Attributes of phases.
ANSWER = "headrace.answer"  # which of several answers, from 0
REQUEST_ID = "headrace.request.id"  # the server's own id, on every span of a request
OPEN_REQUESTS = "headrace.admit.open_requests"  # requests inside the gateway on arrival
QUEUED_REQUESTS = "headrace.admit.queued_requests"  # that waited for a place on arrival
ADMIT_RESULT = "headrace.admit.result"  # "admitted" or the reason of the refusal
BATCH_SIZE = "headrace.tokenizer.batch_size"  # inputs encoded together
CHARACTERS = "headrace.tokenizer.characters"  # that the caller wrote; without what the chat template adds
TOKENS = "headrace.tokens"  # that the phase worked on
CACHED_TOKENS = "headrace.cached_tokens"  # found in the prefix cache
CHUNKS = "headrace.prefill.chunks"  # steps that the prompt was spread over
QUEUE_REASON = "headrace.queue.reason"  # slots, kv, budget or credits
ENGINE_ADDRESS = "headrace.engine.address"
PREDICTED_CACHED_TOKENS = "headrace.route.predicted_cached_tokens"  # of the prompt, by what was sent there before
ATTEMPT = "headrace.route.attempt"  # 0, and one more for each engine that was lost before the first token
STEP_PREFILL_TOKENS = "headrace.step.prefill_tokens"  # of prompts and recomputation
STEP_DECODE_TOKENS = "headrace.step.decode_tokens"
STEP_SEQUENCES = "headrace.step.sequences"
STEP_MEMBERS = "headrace.step.members"  # "request id: tokens" of each request in the step
PREEMPTED_REASON = "headrace.preempted.reason"  # kv, paused or share; see `PreemptReason` of the engine
RECOMPUTED_TOKENS = "headrace.preempted.recomputed_tokens"  # computed again after it
STEPS = "headrace.decode.steps"  # steps that generated a token, or several
DRAFTED_TOKENS = "headrace.decode.drafted_tokens"  # guessed by lookup and computed ahead
ACCEPTED_TOKENS = "headrace.decode.accepted_tokens"  # of those, became output
ITL_P50_MS = "headrace.decode.inter_token_p50_ms"
ITL_P99_MS = "headrace.decode.inter_token_p99_ms"
ITL_MAX_MS = "headrace.decode.inter_token_max_ms"
STALLED_MS = "headrace.decode.stalled_ms"  # by other requests' prefill
STALLED_BY = "headrace.decode.stalled_by"  # "request id: ms" of those whose prefill stalled it, worst first
PAUSED_MS = "headrace.decode.paused_ms"  # by the reader
FINISH_REASON = "headrace.finish_reason"
BUSY_MS = "headrace.detokenize.busy_ms"
DETOKENIZE_CALLS = "headrace.detokenize.calls"  # news from the engine that were turned into text
MESSAGES = "headrace.send.messages"
SENT_BYTES = "headrace.send.bytes"  # of all messages, as protobuf
SEND_FIRST_MS = "headrace.send.first_ms"  # first token received to first message handed on
SEND_BLOCKED_MS = "headrace.send.blocked_ms"
LATE = "headrace.late"  # "failed" or "slow": recorded at its end although the trace was not sampled
TAIL_MS = "headrace.send.tail_ms"  # last token received to final message
