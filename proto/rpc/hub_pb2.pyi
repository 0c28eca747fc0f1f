from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Verdict]
    MERGED: _ClassVar[Verdict]
    REFUSED: _ClassVar[Verdict]
    DISTRUSTED: _ClassVar[Verdict]
NONE: Verdict
MERGED: Verdict
REFUSED: Verdict
DISTRUSTED: Verdict

class Who(_message.Message):
    __slots__ = ("run", "term", "node", "session", "part")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    node: int
    session: int
    part: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., node: _Optional[int] = ..., session: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class Method(_message.Message):
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

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "version", "method", "part", "promised")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    method: Method
    part: int
    promised: int
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., method: _Optional[_Union[Method, _Mapping]] = ..., part: _Optional[int] = ..., promised: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("epoch", "process", "segment", "offset", "chain", "mac")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    process: int
    segment: int
    offset: int
    chain: bytes
    mac: bytes
    def __init__(self, epoch: _Optional[str] = ..., process: _Optional[int] = ..., segment: _Optional[int] = ..., offset: _Optional[int] = ..., chain: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("receipt", "seqs", "versions")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    SEQS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    receipt: Receipt
    seqs: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, receipt: _Optional[_Union[Receipt, _Mapping]] = ..., seqs: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "version", "run", "term", "config", "addresses", "standby", "leads", "promise")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    PROMISE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    run: str
    term: int
    config: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    standby: str
    leads: bool
    promise: Answer
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., run: _Optional[str] = ..., term: _Optional[int] = ..., config: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., standby: _Optional[str] = ..., leads: _Optional[bool] = ..., promise: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Unit(_message.Message):
    __slots__ = ("name", "tensors")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, name: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("who", "name", "layout", "facts", "num_samples", "donor", "ranks", "process", "rejoin", "offer", "prefers", "claim", "inherits", "told", "leased_upto")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WHO_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    REJOIN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PREFERS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    INHERITS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    LEASED_UPTO_FIELD_NUMBER: _ClassVar[int]
    who: Who
    name: str
    layout: _containers.RepeatedCompositeFieldContainer[Unit]
    facts: _containers.ScalarMap[str, str]
    num_samples: int
    donor: str
    ranks: int
    process: int
    rejoin: bytes
    offer: Answer
    prefers: int
    claim: Claim
    inherits: _containers.RepeatedScalarFieldContainer[int]
    told: _containers.RepeatedScalarFieldContainer[int]
    leased_upto: int
    def __init__(self, who: _Optional[_Union[Who, _Mapping]] = ..., name: _Optional[str] = ..., layout: _Optional[_Iterable[_Union[Unit, _Mapping]]] = ..., facts: _Optional[_Mapping[str, str]] = ..., num_samples: _Optional[int] = ..., donor: _Optional[str] = ..., ranks: _Optional[int] = ..., process: _Optional[int] = ..., rejoin: _Optional[bytes] = ..., offer: _Optional[_Union[Answer, _Mapping]] = ..., prefers: _Optional[int] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., inherits: _Optional[_Iterable[int]] = ..., told: _Optional[_Iterable[int]] = ..., leased_upto: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("term", "node", "session", "founder", "versions", "seqs", "donors", "news")
    TERM_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FOUNDER_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SEQS_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    term: int
    node: int
    session: int
    founder: bool
    versions: _containers.RepeatedScalarFieldContainer[int]
    seqs: _containers.RepeatedScalarFieldContainer[int]
    donors: _containers.RepeatedScalarFieldContainer[str]
    news: News
    def __init__(self, term: _Optional[int] = ..., node: _Optional[int] = ..., session: _Optional[int] = ..., founder: _Optional[bool] = ..., versions: _Optional[_Iterable[int]] = ..., seqs: _Optional[_Iterable[int]] = ..., donors: _Optional[_Iterable[str]] = ..., news: _Optional[_Union[News, _Mapping]] = ...) -> None: ...

class Consumed(_message.Message):
    __slots__ = ("start", "upto")
    START_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    start: int
    upto: int
    def __init__(self, start: _Optional[int] = ..., upto: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("who", "steps", "tokens", "steps_per_s", "busy_s", "wait_s", "wire_s", "bytes_up", "bytes_down", "consumed", "claim", "loss", "state", "rl")
    class RlEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WHO_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RL_FIELD_NUMBER: _ClassVar[int]
    who: Who
    steps: int
    tokens: int
    steps_per_s: float
    busy_s: float
    wait_s: float
    wire_s: float
    bytes_up: int
    bytes_down: int
    consumed: _containers.RepeatedCompositeFieldContainer[Consumed]
    claim: Claim
    loss: float
    state: str
    rl: _containers.ScalarMap[str, float]
    def __init__(self, who: _Optional[_Union[Who, _Mapping]] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., consumed: _Optional[_Iterable[_Union[Consumed, _Mapping]]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., loss: _Optional[float] = ..., state: _Optional[str] = ..., rl: _Optional[_Mapping[str, float]] = ...) -> None: ...

class UnitNews(_message.Message):
    __slots__ = ("unit", "version", "seq", "verdict", "reason")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    unit: int
    version: int
    seq: int
    verdict: Verdict
    reason: str
    def __init__(self, unit: _Optional[int] = ..., version: _Optional[int] = ..., seq: _Optional[int] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ("term", "units", "round", "pace_steps", "nodes", "total_steps", "total_tokens", "elapsed_s", "finished", "evaluates", "donors", "progress", "receipt", "asks", "brings", "heartbeat_s", "expire_s")
    TERM_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PACE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    EVALUATES_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    BRINGS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_S_FIELD_NUMBER: _ClassVar[int]
    term: int
    units: _containers.RepeatedCompositeFieldContainer[UnitNews]
    round: int
    pace_steps: int
    nodes: int
    total_steps: int
    total_tokens: int
    elapsed_s: float
    finished: bool
    evaluates: bool
    donors: _containers.RepeatedScalarFieldContainer[str]
    progress: float
    receipt: Receipt
    asks: bool
    brings: _containers.RepeatedScalarFieldContainer[int]
    heartbeat_s: float
    expire_s: float
    def __init__(self, term: _Optional[int] = ..., units: _Optional[_Iterable[_Union[UnitNews, _Mapping]]] = ..., round: _Optional[int] = ..., pace_steps: _Optional[int] = ..., nodes: _Optional[int] = ..., total_steps: _Optional[int] = ..., total_tokens: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., finished: _Optional[bool] = ..., evaluates: _Optional[bool] = ..., donors: _Optional[_Iterable[str]] = ..., progress: _Optional[float] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., asks: _Optional[bool] = ..., brings: _Optional[_Iterable[int]] = ..., heartbeat_s: _Optional[float] = ..., expire_s: _Optional[float] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("who", "samples", "lists_held", "held")
    WHO_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LISTS_HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    who: Who
    samples: int
    lists_held: bool
    held: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, who: _Optional[_Union[Who, _Mapping]] = ..., samples: _Optional[int] = ..., lists_held: _Optional[bool] = ..., held: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("who", "consumed")
    WHO_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    who: Who
    consumed: _containers.RepeatedCompositeFieldContainer[Consumed]
    def __init__(self, who: _Optional[_Union[Who, _Mapping]] = ..., consumed: _Optional[_Iterable[_Union[Consumed, _Mapping]]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("who", "answer")
    WHO_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    who: Who
    answer: Answer
    def __init__(self, who: _Optional[_Union[Who, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class TakeOverReply(_message.Message):
    __slots__ = ("term", "leads", "asks")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    term: int
    leads: bool
    asks: Proposal
    def __init__(self, term: _Optional[int] = ..., leads: _Optional[bool] = ..., asks: _Optional[_Union[Proposal, _Mapping]] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("term", "number")
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    term: int
    number: int
    def __init__(self, term: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("term", "segment", "offset")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    term: int
    segment: int
    offset: int
    def __init__(self, term: _Optional[int] = ..., segment: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("ballot", "proposer", "basis", "extent", "public_key", "signature", "process")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ballot: Ballot
    proposer: int
    basis: Ballot
    extent: Extent
    public_key: bytes
    signature: bytes
    process: int
    def __init__(self, ballot: _Optional[_Union[Ballot, _Mapping]] = ..., proposer: _Optional[int] = ..., basis: _Optional[_Union[Ballot, _Mapping]] = ..., extent: _Optional[_Union[Extent, _Mapping]] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., process: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("voter", "proposer", "ballot", "granted", "term", "accepted", "public_key", "signature", "process")
    VOTER_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    voter: int
    proposer: int
    ballot: Ballot
    granted: bool
    term: int
    accepted: Ballot
    public_key: bytes
    signature: bytes
    process: int
    def __init__(self, voter: _Optional[int] = ..., proposer: _Optional[int] = ..., ballot: _Optional[_Union[Ballot, _Mapping]] = ..., granted: _Optional[bool] = ..., term: _Optional[int] = ..., accepted: _Optional[_Union[Ballot, _Mapping]] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., process: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
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

class PushHead(_message.Message):
    __slots__ = ("who", "unit", "seq", "base", "steps", "tokens", "codec", "num_bytes", "round", "report", "consumed")
    WHO_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    who: Who
    unit: int
    seq: int
    base: int
    steps: int
    tokens: int
    codec: str
    num_bytes: int
    round: int
    report: HeartbeatRequest
    consumed: _containers.RepeatedCompositeFieldContainer[Consumed]
    def __init__(self, who: _Optional[_Union[Who, _Mapping]] = ..., unit: _Optional[int] = ..., seq: _Optional[int] = ..., base: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., codec: _Optional[str] = ..., num_bytes: _Optional[int] = ..., round: _Optional[int] = ..., report: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., consumed: _Optional[_Iterable[_Union[Consumed, _Mapping]]] = ...) -> None: ...

class PartialPush(_message.Message):
    __slots__ = ("num_bytes", "sha256")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    sha256: bytes
    def __init__(self, num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("accepted", "news", "receipt", "run")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    news: UnitNews
    receipt: Receipt
    run: News
    def __init__(self, accepted: _Optional[bool] = ..., news: _Optional[_Union[UnitNews, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., run: _Optional[_Union[News, _Mapping]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("who", "unit", "base", "version", "offset")
    WHO_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    who: Who
    unit: int
    base: int
    version: int
    offset: int
    def __init__(self, who: _Optional[_Union[Who, _Mapping]] = ..., unit: _Optional[int] = ..., base: _Optional[int] = ..., version: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("version", "num_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_bytes: int
    def __init__(self, version: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class PullHead(_message.Message):
    __slots__ = ("version", "codec", "chain", "num_bytes", "sha256", "statement")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    version: int
    codec: str
    chain: _containers.RepeatedCompositeFieldContainer[Link]
    num_bytes: int
    sha256: bytes
    statement: bytes
    def __init__(self, version: _Optional[int] = ..., codec: _Optional[str] = ..., chain: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., statement: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("metrics_after",)
    METRICS_AFTER_FIELD_NUMBER: _ClassVar[int]
    metrics_after: int
    def __init__(self, metrics_after: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class TailRequest(_message.Message):
    __slots__ = ("term", "segment", "offset", "chain", "last_term", "snapshot_segment", "snapshot_bytes", "snapshot_sha256")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LAST_TERM_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SHA256_FIELD_NUMBER: _ClassVar[int]
    term: int
    segment: int
    offset: int
    chain: bytes
    last_term: int
    snapshot_segment: int
    snapshot_bytes: int
    snapshot_sha256: bytes
    def __init__(self, term: _Optional[int] = ..., segment: _Optional[int] = ..., offset: _Optional[int] = ..., chain: _Optional[bytes] = ..., last_term: _Optional[int] = ..., snapshot_segment: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., snapshot_sha256: _Optional[bytes] = ...) -> None: ...

class TailChunk(_message.Message):
    __slots__ = ("segment", "offset", "data", "snapshot", "crc", "differs", "lacks_term", "traces")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    LACKS_TERM_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset: int
    data: bytes
    snapshot: bool
    crc: int
    differs: bool
    lacks_term: bool
    traces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, segment: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., snapshot: _Optional[bool] = ..., crc: _Optional[int] = ..., differs: _Optional[bool] = ..., lacks_term: _Optional[bool] = ..., traces: _Optional[_Iterable[str]] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("term", "segment", "offset", "replica", "address", "public_key", "signature")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    term: int
    segment: int
    offset: int
    replica: int
    address: str
    public_key: bytes
    signature: bytes
    def __init__(self, term: _Optional[int] = ..., segment: _Optional[int] = ..., offset: _Optional[int] = ..., replica: _Optional[int] = ..., address: _Optional[str] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("run", "proposal", "part", "public_key", "signature")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run: str
    proposal: Proposal
    part: int
    public_key: bytes
    signature: bytes
    def __init__(self, run: _Optional[str] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., part: _Optional[int] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ConfirmReply(_message.Message):
    __slots__ = ("stand", "counts")
    STAND_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    stand: bool
    counts: bool
    def __init__(self, stand: _Optional[bool] = ..., counts: _Optional[bool] = ...) -> None: ...
