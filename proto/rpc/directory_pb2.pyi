from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerCard(_message.Message):
    __slots__ = ("run", "name", "address", "process", "public_key", "rows", "tokens_per_s", "serial", "running", "waiting", "state", "idle_s", "idle_used_s", "figures", "signature")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_USED_S_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    address: str
    process: int
    public_key: bytes
    rows: int
    tokens_per_s: float
    serial: int
    running: int
    waiting: int
    state: str
    idle_s: float
    idle_used_s: float
    figures: _containers.ScalarMap[str, float]
    signature: bytes
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., process: _Optional[int] = ..., public_key: _Optional[bytes] = ..., rows: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., serial: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., state: _Optional[str] = ..., idle_s: _Optional[float] = ..., idle_used_s: _Optional[float] = ..., figures: _Optional[_Mapping[str, float]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ("lease_s", "banned", "reason", "finished")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    banned: bool
    reason: str
    finished: bool
    def __init__(self, lease_s: _Optional[float] = ..., banned: _Optional[bool] = ..., reason: _Optional[str] = ..., finished: _Optional[bool] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("run", "name", "process")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    process: int
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., process: _Optional[int] = ...) -> None: ...

class WithdrawReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServersRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ServersReply(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[ServerCard]
    def __init__(self, servers: _Optional[_Iterable[_Union[ServerCard, _Mapping]]] = ...) -> None: ...

class Accusation(_message.Message):
    __slots__ = ("run", "node", "session", "server", "public_key", "reason", "evidence")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    node: int
    session: int
    server: str
    public_key: bytes
    reason: str
    evidence: bytes
    def __init__(self, run: _Optional[str] = ..., node: _Optional[int] = ..., session: _Optional[int] = ..., server: _Optional[str] = ..., public_key: _Optional[bytes] = ..., reason: _Optional[str] = ..., evidence: _Optional[bytes] = ...) -> None: ...

class AccuseReply(_message.Message):
    __slots__ = ("banned",)
    BANNED_FIELD_NUMBER: _ClassVar[int]
    banned: bool
    def __init__(self, banned: _Optional[bool] = ...) -> None: ...
