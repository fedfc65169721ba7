from headrace.v1 import engine_pb2 as _engine_pb2
from headrace.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeliverRequest(_message.Message):
    __slots__ = ("open", "credits", "cancel", "resume")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    open: DeliverOpen
    credits: DeliverCredits
    cancel: DeliverCancel
    resume: DeliverResume
    def __init__(self, open: _Optional[_Union[DeliverOpen, _Mapping]] = ..., credits: _Optional[_Union[DeliverCredits, _Mapping]] = ..., cancel: _Optional[_Union[DeliverCancel, _Mapping]] = ..., resume: _Optional[_Union[DeliverResume, _Mapping]] = ...) -> None: ...

class DeliverResponse(_message.Message):
    __slots__ = ("delta", "final", "failure", "sequence_number")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    delta: DeliverDelta
    final: DeliverFinal
    failure: bytes
    sequence_number: int
    def __init__(self, delta: _Optional[_Union[DeliverDelta, _Mapping]] = ..., final: _Optional[_Union[DeliverFinal, _Mapping]] = ..., failure: _Optional[bytes] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class DeliverOpen(_message.Message):
    __slots__ = ("engine_address", "generation", "stop", "include_token_ids", "whole", "stream_id", "tenant", "fallback_engine_addresses")
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_ENGINE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    engine_address: str
    generation: _engine_pb2.OpenGeneration
    stop: _generation_pb2.StopConditions
    include_token_ids: bool
    whole: bool
    stream_id: str
    tenant: str
    fallback_engine_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_address: _Optional[str] = ..., generation: _Optional[_Union[_engine_pb2.OpenGeneration, _Mapping]] = ..., stop: _Optional[_Union[_generation_pb2.StopConditions, _Mapping]] = ..., include_token_ids: _Optional[bool] = ..., whole: _Optional[bool] = ..., stream_id: _Optional[str] = ..., tenant: _Optional[str] = ..., fallback_engine_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class DeliverCredits(_message.Message):
    __slots__ = ("credit_count", "index")
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    credit_count: int
    index: int
    def __init__(self, credit_count: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class DeliverCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeliverResume(_message.Message):
    __slots__ = ("stream_id", "tenant", "last_sequence_number", "credit_count")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    tenant: str
    last_sequence_number: int
    credit_count: int
    def __init__(self, stream_id: _Optional[str] = ..., tenant: _Optional[str] = ..., last_sequence_number: _Optional[int] = ..., credit_count: _Optional[int] = ...) -> None: ...

class DeliverDelta(_message.Message):
    __slots__ = ("index", "text", "token_count", "token_ids", "logprobs", "first_token_timings")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    first_token_timings: FirstTokenTimings
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., first_token_timings: _Optional[_Union[FirstTokenTimings, _Mapping]] = ...) -> None: ...

class DeliverFinal(_message.Message):
    __slots__ = ("endings", "usage", "engine_timings", "relay_timings", "prompt_logprobs", "resume_count")
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    RELAY_TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESUME_COUNT_FIELD_NUMBER: _ClassVar[int]
    endings: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Ending]
    usage: _generation_pb2.Usage
    engine_timings: _engine_pb2.EngineTimings
    relay_timings: RelayTimings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    resume_count: int
    def __init__(self, endings: _Optional[_Iterable[_Union[_generation_pb2.Ending, _Mapping]]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., engine_timings: _Optional[_Union[_engine_pb2.EngineTimings, _Mapping]] = ..., relay_timings: _Optional[_Union[RelayTimings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., resume_count: _Optional[int] = ...) -> None: ...

class FirstTokenTimings(_message.Message):
    __slots__ = ("total_ns", "engine_hop_ns", "engine_ns", "queue_ns", "prefill_ns")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_HOP_NS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    engine_hop_ns: int
    engine_ns: int
    queue_ns: int
    prefill_ns: int
    def __init__(self, total_ns: _Optional[int] = ..., engine_hop_ns: _Optional[int] = ..., engine_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ...) -> None: ...

class RelayTimings(_message.Message):
    __slots__ = ("total_ns", "detokenize_ns", "send_blocked_ns", "tail_ns", "message_count", "decode_ns")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_NS_FIELD_NUMBER: _ClassVar[int]
    SEND_BLOCKED_NS_FIELD_NUMBER: _ClassVar[int]
    TAIL_NS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    detokenize_ns: int
    send_blocked_ns: int
    tail_ns: int
    message_count: int
    decode_ns: int
    def __init__(self, total_ns: _Optional[int] = ..., detokenize_ns: _Optional[int] = ..., send_blocked_ns: _Optional[int] = ..., tail_ns: _Optional[int] = ..., message_count: _Optional[int] = ..., decode_ns: _Optional[int] = ...) -> None: ...
