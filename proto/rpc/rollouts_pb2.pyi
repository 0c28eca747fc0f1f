from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToServer(_message.Message):
    __slots__ = ("open", "add", "remove", "beat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    open: Open
    add: Add
    remove: Remove
    beat: Beat
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., add: _Optional[_Union[Add, _Mapping]] = ..., remove: _Optional[_Union[Remove, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "run", "line", "trainer", "rank", "on_new_version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ON_NEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: str
    line: str
    trainer: str
    rank: int
    on_new_version: str
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[str] = ..., line: _Optional[str] = ..., trainer: _Optional[str] = ..., rank: _Optional[int] = ..., on_new_version: _Optional[str] = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ("rollout", "sample", "group", "prompt", "sampling", "min_version", "tokens", "logprobs", "spans", "traceparent")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    rollout: int
    sample: int
    group: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: bytes
    min_version: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    traceparent: str
    def __init__(self, rollout: _Optional[int] = ..., sample: _Optional[int] = ..., group: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[bytes] = ..., min_version: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Remove(_message.Message):
    __slots__ = ("rollout", "sample", "drop")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    rollout: int
    sample: int
    drop: bool
    def __init__(self, rollout: _Optional[int] = ..., sample: _Optional[int] = ..., drop: _Optional[bool] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToTrainer(_message.Message):
    __slots__ = ("opened", "tokens", "ended", "removed", "figures", "rejected")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    tokens: Tokens
    ended: Ended
    removed: Removed
    figures: Figures
    rejected: Rejected
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., removed: _Optional[_Union[Removed, _Mapping]] = ..., figures: _Optional[_Union[Figures, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("protocol", "server", "rows", "max_waiting", "max_tokens", "public_key")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    server: str
    rows: int
    max_waiting: int
    max_tokens: int
    public_key: bytes
    def __init__(self, protocol: _Optional[int] = ..., server: _Optional[str] = ..., rows: _Optional[int] = ..., max_waiting: _Optional[int] = ..., max_tokens: _Optional[int] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("rollout", "sample", "start", "tokens", "logprobs", "versions", "top_logprobs", "passes")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    rollout: int
    sample: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: bytes
    passes: int
    def __init__(self, rollout: _Optional[int] = ..., sample: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[bytes] = ..., passes: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("rollout", "sample", "finish_reason", "passes", "signature")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    rollout: int
    sample: int
    finish_reason: str
    passes: int
    signature: bytes
    def __init__(self, rollout: _Optional[int] = ..., sample: _Optional[int] = ..., finish_reason: _Optional[str] = ..., passes: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class RolloutStatement(_message.Message):
    __slots__ = ("run", "line", "server", "rollout", "sample", "prompt_sha256", "sampling_sha256", "answer_sha256", "logprobs_sha256", "spans", "finish_reason", "given")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_SHA256_FIELD_NUMBER: _ClassVar[int]
    ANSWER_SHA256_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    run: str
    line: str
    server: str
    rollout: int
    sample: int
    prompt_sha256: bytes
    sampling_sha256: bytes
    answer_sha256: bytes
    logprobs_sha256: bytes
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    finish_reason: str
    given: int
    def __init__(self, run: _Optional[str] = ..., line: _Optional[str] = ..., server: _Optional[str] = ..., rollout: _Optional[int] = ..., sample: _Optional[int] = ..., prompt_sha256: _Optional[bytes] = ..., sampling_sha256: _Optional[bytes] = ..., answer_sha256: _Optional[bytes] = ..., logprobs_sha256: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., given: _Optional[int] = ...) -> None: ...

class Removed(_message.Message):
    __slots__ = ("rollout", "sample", "found")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    rollout: int
    sample: int
    found: bool
    def __init__(self, rollout: _Optional[int] = ..., sample: _Optional[int] = ..., found: _Optional[bool] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("version", "drafter", "fixed_s", "row_s", "prefill_s", "json", "ending")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    version: int
    drafter: int
    fixed_s: float
    row_s: float
    prefill_s: float
    json: bytes
    ending: bool
    def __init__(self, version: _Optional[int] = ..., drafter: _Optional[int] = ..., fixed_s: _Optional[float] = ..., row_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., json: _Optional[bytes] = ..., ending: _Optional[bool] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("rollout", "sample", "reason", "final", "retry_after_s")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    rollout: int
    sample: int
    reason: str
    final: bool
    retry_after_s: float
    def __init__(self, rollout: _Optional[int] = ..., sample: _Optional[int] = ..., reason: _Optional[str] = ..., final: _Optional[bool] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class ServerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerStatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
