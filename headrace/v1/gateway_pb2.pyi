from headrace.v1 import engine_pb2 as _engine_pb2
from headrace.v1 import generation_pb2 as _generation_pb2
from headrace.v1 import timings_pb2 as _timings_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: _generation_pb2.Generation
    def __init__(self, generation: _Optional[_Union[_generation_pb2.Generation, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("answers", "usage", "timings", "request_id", "trace_id", "model", "metadata", "prompt_logprobs")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    usage: _generation_pb2.Usage
    timings: _timings_pb2.StageTimings
    request_id: str
    trace_id: str
    model: str
    metadata: _containers.ScalarMap[str, str]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_timings_pb2.StageTimings, _Mapping]] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., model: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: _generation_pb2.Generation
    def __init__(self, generation: _Optional[_Union[_generation_pb2.Generation, _Mapping]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("sequence_number", "delta", "final")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    delta: Delta
    final: Final
    def __init__(self, sequence_number: _Optional[int] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class GenerateSessionRequest(_message.Message):
    __slots__ = ("open", "credits", "cancel", "resume")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    open: SessionOpen
    credits: SessionCredits
    cancel: SessionCancel
    resume: SessionResume
    def __init__(self, open: _Optional[_Union[SessionOpen, _Mapping]] = ..., credits: _Optional[_Union[SessionCredits, _Mapping]] = ..., cancel: _Optional[_Union[SessionCancel, _Mapping]] = ..., resume: _Optional[_Union[SessionResume, _Mapping]] = ...) -> None: ...

class GenerateSessionResponse(_message.Message):
    __slots__ = ("sequence_number", "opened", "delta", "final")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    opened: SessionOpened
    delta: Delta
    final: Final
    def __init__(self, sequence_number: _Optional[int] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: _generation_pb2.Chat
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_generation_pb2.Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "include_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., include_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("engines", "open_request_count")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineState]
    open_request_count: int
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineState, _Mapping]]] = ..., open_request_count: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "ending")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    ending: _generation_pb2.Ending
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., ending: _Optional[_Union[_generation_pb2.Ending, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "text", "token_count", "token_ids", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_count: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_count: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("endings", "usage", "timings", "request_id", "trace_id", "model", "metadata", "prompt_logprobs")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    endings: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Ending]
    usage: _generation_pb2.Usage
    timings: _timings_pb2.StageTimings
    request_id: str
    trace_id: str
    model: str
    metadata: _containers.ScalarMap[str, str]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, endings: _Optional[_Iterable[_Union[_generation_pb2.Ending, _Mapping]]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_timings_pb2.StageTimings, _Mapping]] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., model: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("generation", "credit_count")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    generation: _generation_pb2.Generation
    credit_count: int
    def __init__(self, generation: _Optional[_Union[_generation_pb2.Generation, _Mapping]] = ..., credit_count: _Optional[int] = ...) -> None: ...

class SessionCredits(_message.Message):
    __slots__ = ("credit_count", "index")
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    credit_count: int
    index: int
    def __init__(self, credit_count: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class SessionCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionResume(_message.Message):
    __slots__ = ("stream_id", "last_sequence_number", "credit_count")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    last_sequence_number: int
    credit_count: int
    def __init__(self, stream_id: _Optional[str] = ..., last_sequence_number: _Optional[int] = ..., credit_count: _Optional[int] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("stream_id", "trace_id")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    trace_id: str
    def __init__(self, stream_id: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "context_length", "vocabulary_size", "dtype", "quantization", "kv_cache_dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    context_length: int
    vocabulary_size: int
    dtype: str
    quantization: str
    kv_cache_dtype: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., context_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("address", "reachable", "model", "stats", "dtype", "quantization", "kv_cache_dtype")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    address: str
    reachable: bool
    model: str
    stats: _engine_pb2.EngineStats
    dtype: str
    quantization: str
    kv_cache_dtype: str
    def __init__(self, address: _Optional[str] = ..., reachable: _Optional[bool] = ..., model: _Optional[str] = ..., stats: _Optional[_Union[_engine_pb2.EngineStats, _Mapping]] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ...) -> None: ...
