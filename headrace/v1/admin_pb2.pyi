from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("engine_address",)
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_address: str
    def __init__(self, engine_address: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("flushed_block_count",)
    FLUSHED_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    flushed_block_count: int
    def __init__(self, flushed_block_count: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("engine_address",)
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_address: str
    def __init__(self, engine_address: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("engine_address",)
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_address: str
    def __init__(self, engine_address: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("engine_address",)
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_address: str
    def __init__(self, engine_address: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("open_stream_count",)
    OPEN_STREAM_COUNT_FIELD_NUMBER: _ClassVar[int]
    open_stream_count: int
    def __init__(self, open_stream_count: _Optional[int] = ...) -> None: ...

class GetConfigurationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigurationResponse(_message.Message):
    __slots__ = ("settings",)
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.ScalarMap[str, str]
    def __init__(self, settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("engine_address", "step_count")
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    engine_address: str
    step_count: int
    def __init__(self, engine_address: _Optional[str] = ..., step_count: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("chrome_trace",)
    CHROME_TRACE_FIELD_NUMBER: _ClassVar[int]
    chrome_trace: bytes
    def __init__(self, chrome_trace: _Optional[bytes] = ...) -> None: ...
