from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnitVersion(_message.Message):
    __slots__ = ("name", "version", "sha256", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    sha256: bytes
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., sha256: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("line", "serial", "parent", "dtype", "units")
    LINE_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    line: str
    serial: int
    parent: int
    dtype: str
    units: _containers.RepeatedCompositeFieldContainer[UnitVersion]
    def __init__(self, line: _Optional[str] = ..., serial: _Optional[int] = ..., parent: _Optional[int] = ..., dtype: _Optional[str] = ..., units: _Optional[_Iterable[_Union[UnitVersion, _Mapping]]] = ...) -> None: ...

class NewestRequest(_message.Message):
    __slots__ = ("line", "after", "wait_s")
    LINE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    line: str
    after: int
    wait_s: float
    def __init__(self, line: _Optional[str] = ..., after: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("line", "serial", "unit", "base", "offset", "transfer")
    LINE_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    line: str
    serial: int
    unit: str
    base: int
    offset: int
    transfer: bytes
    def __init__(self, line: _Optional[str] = ..., serial: _Optional[int] = ..., unit: _Optional[str] = ..., base: _Optional[int] = ..., offset: _Optional[int] = ..., transfer: _Optional[bytes] = ...) -> None: ...

class TransferHead(_message.Message):
    __slots__ = ("line", "serial", "unit", "base", "encoding", "num_bytes", "sha256")
    LINE_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    line: str
    serial: int
    unit: str
    base: int
    encoding: str
    num_bytes: int
    sha256: bytes
    def __init__(self, line: _Optional[str] = ..., serial: _Optional[int] = ..., unit: _Optional[str] = ..., base: _Optional[int] = ..., encoding: _Optional[str] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class VersionChunk(_message.Message):
    __slots__ = ("offset", "crc", "data", "head")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    offset: int
    crc: int
    data: bytes
    head: bytes
    def __init__(self, offset: _Optional[int] = ..., crc: _Optional[int] = ..., data: _Optional[bytes] = ..., head: _Optional[bytes] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("unit", "base", "transfer", "offset")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    unit: str
    base: int
    transfer: bytes
    offset: int
    def __init__(self, unit: _Optional[str] = ..., base: _Optional[int] = ..., transfer: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[Missing]
    def __init__(self, missing: _Optional[_Iterable[_Union[Missing, _Mapping]]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
