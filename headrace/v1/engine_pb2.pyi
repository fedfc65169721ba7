from headrace.v1 import generation_pb2 as _generation_pb2
from headrace.v1 import timings_pb2 as _timings_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("open", "grant", "cancel", "more_grants")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MORE_GRANTS_FIELD_NUMBER: _ClassVar[int]
    open: OpenGeneration
    grant: GrantCredits
    cancel: CancelGeneration
    more_grants: _containers.RepeatedCompositeFieldContainer[GrantCredits]
    def __init__(self, open: _Optional[_Union[OpenGeneration, _Mapping]] = ..., grant: _Optional[_Union[GrantCredits, _Mapping]] = ..., cancel: _Optional[_Union[CancelGeneration, _Mapping]] = ..., more_grants: _Optional[_Iterable[_Union[GrantCredits, _Mapping]]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[GenerationOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[GenerationOutput, _Mapping]]] = ...) -> None: ...

class GetEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineResponse(_message.Message):
    __slots__ = ("model", "architecture", "dtype", "context_length", "vocabulary_size", "eos_token_ids", "kv_token_capacity", "max_num_seqs", "max_num_batched_tokens", "default_sampling", "memory", "quantization", "kv_cache_dtype")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    dtype: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_token_capacity: int
    max_num_seqs: int
    max_num_batched_tokens: int
    default_sampling: _generation_pb2.SamplingParameters
    memory: MemoryLedger
    quantization: str
    kv_cache_dtype: str
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., context_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., kv_token_capacity: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., default_sampling: _Optional[_Union[_generation_pb2.SamplingParameters, _Mapping]] = ..., memory: _Optional[_Union[MemoryLedger, _Mapping]] = ..., quantization: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ...) -> None: ...

class EngineServiceGetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineServiceGetStatsResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: EngineStats
    def __init__(self, stats: _Optional[_Union[EngineStats, _Mapping]] = ...) -> None: ...

class EngineServiceFlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineServiceFlushPrefixCacheResponse(_message.Message):
    __slots__ = ("flushed_block_count",)
    FLUSHED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    flushed_block_count: int
    def __init__(self, flushed_block_count: _Optional[int] = ...) -> None: ...

class EngineServicePauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineServicePauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineServiceResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineServiceResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineServiceDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineServiceDrainResponse(_message.Message):
    __slots__ = ("open_generation_count",)
    OPEN_GENERATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    open_generation_count: int
    def __init__(self, open_generation_count: _Optional[int] = ...) -> None: ...

class EngineServiceProfileRequest(_message.Message):
    __slots__ = ("step_count",)
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    step_count: int
    def __init__(self, step_count: _Optional[int] = ...) -> None: ...

class EngineServiceProfileResponse(_message.Message):
    __slots__ = ("chrome_trace",)
    CHROME_TRACE_FIELD_NUMBER: _ClassVar[int]
    chrome_trace: bytes
    def __init__(self, chrome_trace: _Optional[bytes] = ...) -> None: ...

class OpenGeneration(_message.Message):
    __slots__ = ("generation_id", "request_id", "prompt_token_ids", "sampling", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs", "priority", "cache_salt", "timeout_ns", "credit_count", "traceparent", "tracestate", "bad_token_sequences", "generated_token_ids", "fair_key", "fair_weight")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAIR_KEY_FIELD_NUMBER: _ClassVar[int]
    FAIR_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    generation_id: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParameters
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    priority: _generation_pb2.Priority
    cache_salt: bytes
    timeout_ns: int
    credit_count: int
    traceparent: str
    tracestate: str
    bad_token_sequences: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenIds]
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    fair_key: bytes
    fair_weight: float
    def __init__(self, generation_id: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParameters, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[_Union[_generation_pb2.Priority, str]] = ..., cache_salt: _Optional[bytes] = ..., timeout_ns: _Optional[int] = ..., credit_count: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., bad_token_sequences: _Optional[_Iterable[_Union[_generation_pb2.TokenIds, _Mapping]]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., fair_key: _Optional[bytes] = ..., fair_weight: _Optional[float] = ...) -> None: ...

class GrantCredits(_message.Message):
    __slots__ = ("generation_id", "credit_count", "index")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    generation_id: int
    credit_count: int
    index: int
    def __init__(self, generation_id: _Optional[int] = ..., credit_count: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class CancelGeneration(_message.Message):
    __slots__ = ("generation_id", "index", "complete")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    generation_id: int
    index: int
    complete: bool
    def __init__(self, generation_id: _Optional[int] = ..., index: _Optional[int] = ..., complete: _Optional[bool] = ...) -> None: ...

class GenerationOutput(_message.Message):
    __slots__ = ("generation_id", "index", "token_ids", "logprobs", "first_token_timings", "ending", "prompt_logprobs")
    GENERATION_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    generation_id: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    first_token_timings: EngineTimings
    ending: GenerationEnding
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, generation_id: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., first_token_timings: _Optional[_Union[EngineTimings, _Mapping]] = ..., ending: _Optional[_Union[GenerationEnding, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerationEnding(_message.Message):
    __slots__ = ("finish_reason", "matched_token_id", "usage", "timings", "error_code", "error_reason", "error_field", "error_message")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _generation_pb2.FinishReason
    matched_token_id: int
    usage: _generation_pb2.Usage
    timings: EngineTimings
    error_code: int
    error_reason: str
    error_field: str
    error_message: str
    def __init__(self, finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[EngineTimings, _Mapping]] = ..., error_code: _Optional[int] = ..., error_reason: _Optional[str] = ..., error_field: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...

class EngineTimings(_message.Message):
    __slots__ = ("total_ns", "queue_ns", "queue_reason", "prefill_ns", "computed_token_count", "cached_token_count", "prefill_chunk_count", "decode_ns", "decode_step_count", "inter_token_p50_ns", "inter_token_p99_ns", "inter_token_max_ns", "stalled_ns", "paused_ns", "preempted_ns", "preemption_count", "recomputed_token_count", "drafted_token_count", "accepted_token_count")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P50_NS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P99_NS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_MAX_NS_FIELD_NUMBER: _ClassVar[int]
    STALLED_NS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    queue_ns: int
    queue_reason: _timings_pb2.QueueReason
    prefill_ns: int
    computed_token_count: int
    cached_token_count: int
    prefill_chunk_count: int
    decode_ns: int
    decode_step_count: int
    inter_token_p50_ns: int
    inter_token_p99_ns: int
    inter_token_max_ns: int
    stalled_ns: int
    paused_ns: int
    preempted_ns: int
    preemption_count: int
    recomputed_token_count: int
    drafted_token_count: int
    accepted_token_count: int
    def __init__(self, total_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., queue_reason: _Optional[_Union[_timings_pb2.QueueReason, str]] = ..., prefill_ns: _Optional[int] = ..., computed_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., prefill_chunk_count: _Optional[int] = ..., decode_ns: _Optional[int] = ..., decode_step_count: _Optional[int] = ..., inter_token_p50_ns: _Optional[int] = ..., inter_token_p99_ns: _Optional[int] = ..., inter_token_max_ns: _Optional[int] = ..., stalled_ns: _Optional[int] = ..., paused_ns: _Optional[int] = ..., preempted_ns: _Optional[int] = ..., preemption_count: _Optional[int] = ..., recomputed_token_count: _Optional[int] = ..., drafted_token_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("running_count", "waiting_count", "paused_count", "open_stream_count", "kv_total_block_count", "kv_free_block_count", "kv_cached_block_count", "preemption_count", "prefilled_token_count", "decoded_token_count", "step_count", "kv_wasted_token_count", "drafted_token_count", "accepted_token_count", "resident_bytes", "resident_file_bytes", "resident_weight_bytes", "resident_kv_bytes")
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAM_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_CACHED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_WASTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    running_count: int
    waiting_count: int
    paused_count: int
    open_stream_count: int
    kv_total_block_count: int
    kv_free_block_count: int
    kv_cached_block_count: int
    preemption_count: int
    prefilled_token_count: int
    decoded_token_count: int
    step_count: int
    kv_wasted_token_count: int
    drafted_token_count: int
    accepted_token_count: int
    resident_bytes: int
    resident_file_bytes: int
    resident_weight_bytes: int
    resident_kv_bytes: int
    def __init__(self, running_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., paused_count: _Optional[int] = ..., open_stream_count: _Optional[int] = ..., kv_total_block_count: _Optional[int] = ..., kv_free_block_count: _Optional[int] = ..., kv_cached_block_count: _Optional[int] = ..., preemption_count: _Optional[int] = ..., prefilled_token_count: _Optional[int] = ..., decoded_token_count: _Optional[int] = ..., step_count: _Optional[int] = ..., kv_wasted_token_count: _Optional[int] = ..., drafted_token_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., resident_file_bytes: _Optional[int] = ..., resident_weight_bytes: _Optional[int] = ..., resident_kv_bytes: _Optional[int] = ...) -> None: ...

class MemoryLedger(_message.Message):
    __slots__ = ("weight_bytes", "kv_bytes", "kv_bytes_per_token", "kv_block_size", "kv_block_count", "kv_formula", "peak_activation_bytes", "allocator_reserved_bytes", "allocator_allocated_bytes", "allocator_largest_free_bytes")
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMULA_FIELD_NUMBER: _ClassVar[int]
    PEAK_ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATOR_LARGEST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    kv_block_size: int
    kv_block_count: int
    kv_formula: str
    peak_activation_bytes: int
    allocator_reserved_bytes: int
    allocator_allocated_bytes: int
    allocator_largest_free_bytes: int
    def __init__(self, weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., kv_block_count: _Optional[int] = ..., kv_formula: _Optional[str] = ..., peak_activation_bytes: _Optional[int] = ..., allocator_reserved_bytes: _Optional[int] = ..., allocator_allocated_bytes: _Optional[int] = ..., allocator_largest_free_bytes: _Optional[int] = ...) -> None: ...
