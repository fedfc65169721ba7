from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QueueReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUEUE_REASON_UNSPECIFIED: _ClassVar[QueueReason]
    QUEUE_REASON_SLOTS: _ClassVar[QueueReason]
    QUEUE_REASON_KV: _ClassVar[QueueReason]
    QUEUE_REASON_BUDGET: _ClassVar[QueueReason]
    QUEUE_REASON_CREDITS: _ClassVar[QueueReason]
QUEUE_REASON_UNSPECIFIED: QueueReason
QUEUE_REASON_SLOTS: QueueReason
QUEUE_REASON_KV: QueueReason
QUEUE_REASON_BUDGET: QueueReason
QUEUE_REASON_CREDITS: QueueReason

class StageTimings(_message.Message):
    __slots__ = ("total_ns", "time_to_first_token_ns", "admit_ns", "tokenize_ns", "tokenize_wait_ns", "tokenize_encode_ns", "route_ns", "transit_ns", "queue_ns", "queue_reason", "prefill_ns", "computed_token_count", "cached_token_count", "prefill_chunk_count", "first_delivery_ns", "decode_ns", "decode_step_count", "inter_token_p50_ns", "inter_token_p99_ns", "inter_token_max_ns", "stalled_ns", "paused_ns", "preempted_ns", "preemption_count", "detokenize_ns", "send_blocked_ns", "tail_ns", "residual_ns", "resume_count", "decode_delivery_ns", "drafted_token_count", "accepted_token_count")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_NS_FIELD_NUMBER: _ClassVar[int]
    TRANSIT_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_DELIVERY_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P50_NS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_P99_NS_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_MAX_NS_FIELD_NUMBER: _ClassVar[int]
    STALLED_NS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_NS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_COUNT_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_NS_FIELD_NUMBER: _ClassVar[int]
    SEND_BLOCKED_NS_FIELD_NUMBER: _ClassVar[int]
    TAIL_NS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_NS_FIELD_NUMBER: _ClassVar[int]
    RESUME_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODE_DELIVERY_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    time_to_first_token_ns: int
    admit_ns: int
    tokenize_ns: int
    tokenize_wait_ns: int
    tokenize_encode_ns: int
    route_ns: int
    transit_ns: int
    queue_ns: int
    queue_reason: QueueReason
    prefill_ns: int
    computed_token_count: int
    cached_token_count: int
    prefill_chunk_count: int
    first_delivery_ns: int
    decode_ns: int
    decode_step_count: int
    inter_token_p50_ns: int
    inter_token_p99_ns: int
    inter_token_max_ns: int
    stalled_ns: int
    paused_ns: int
    preempted_ns: int
    preemption_count: int
    detokenize_ns: int
    send_blocked_ns: int
    tail_ns: int
    residual_ns: int
    resume_count: int
    decode_delivery_ns: int
    drafted_token_count: int
    accepted_token_count: int
    def __init__(self, total_ns: _Optional[int] = ..., time_to_first_token_ns: _Optional[int] = ..., admit_ns: _Optional[int] = ..., tokenize_ns: _Optional[int] = ..., tokenize_wait_ns: _Optional[int] = ..., tokenize_encode_ns: _Optional[int] = ..., route_ns: _Optional[int] = ..., transit_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., queue_reason: _Optional[_Union[QueueReason, str]] = ..., prefill_ns: _Optional[int] = ..., computed_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., prefill_chunk_count: _Optional[int] = ..., first_delivery_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., decode_step_count: _Optional[int] = ..., inter_token_p50_ns: _Optional[int] = ..., inter_token_p99_ns: _Optional[int] = ..., inter_token_max_ns: _Optional[int] = ..., stalled_ns: _Optional[int] = ..., paused_ns: _Optional[int] = ..., preempted_ns: _Optional[int] = ..., preemption_count: _Optional[int] = ..., detokenize_ns: _Optional[int] = ..., send_blocked_ns: _Optional[int] = ..., tail_ns: _Optional[int] = ..., residual_ns: _Optional[int] = ..., resume_count: _Optional[int] = ..., decode_delivery_ns: _Optional[int] = ..., drafted_token_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ...) -> None: ...
