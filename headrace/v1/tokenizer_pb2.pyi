from headrace.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("inputs",)
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[EncodeInput]
    def __init__(self, inputs: _Optional[_Iterable[_Union[EncodeInput, _Mapping]]] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("encodings", "timings")
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    encodings: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenIds]
    timings: EncodeTimings
    def __init__(self, encodings: _Optional[_Iterable[_Union[_generation_pb2.TokenIds, _Mapping]]] = ..., timings: _Optional[_Union[EncodeTimings, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("token_ids", "include_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., include_special_tokens: _Optional[bool] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetVocabularyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVocabularyResponse(_message.Message):
    __slots__ = ("model", "vocabulary_size", "special_token_ids", "bos_token_id", "eos_token_ids", "has_chat_template", "max_input_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocabulary_size: int
    special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    max_input_bytes: int
    def __init__(self, model: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., special_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., max_input_bytes: _Optional[int] = ...) -> None: ...

class EncodeInput(_message.Message):
    __slots__ = ("text", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: _generation_pb2.Chat
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[_generation_pb2.Chat, _Mapping]] = ...) -> None: ...

class EncodeTimings(_message.Message):
    __slots__ = ("total_ns", "wait_ns", "encode_ns", "batch_size")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    wait_ns: int
    encode_ns: int
    batch_size: int
    def __init__(self, total_ns: _Optional[int] = ..., wait_ns: _Optional[int] = ..., encode_ns: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...
