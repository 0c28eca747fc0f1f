from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Card(_message.Message):
    __slots__ = ("run", "name", "public_key", "serial", "address", "parts", "fingerprint", "model", "steps_per_s", "lease_s", "leaving", "foundings")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    FOUNDINGS_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    public_key: bytes
    serial: int
    address: str
    parts: _containers.RepeatedCompositeFieldContainer[HostedPart]
    fingerprint: str
    model: str
    steps_per_s: float
    lease_s: float
    leaving: bool
    foundings: _containers.RepeatedCompositeFieldContainer[Founding]
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., public_key: _Optional[bytes] = ..., serial: _Optional[int] = ..., address: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[HostedPart, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., steps_per_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., leaving: _Optional[bool] = ..., foundings: _Optional[_Iterable[_Union[Founding, _Mapping]]] = ...) -> None: ...

class Founding(_message.Message):
    __slots__ = ("part", "generation", "candidate", "members", "forced", "founder")
    PART_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    FOUNDER_FIELD_NUMBER: _ClassVar[int]
    part: int
    generation: int
    candidate: bytes
    members: int
    forced: int
    founder: bytes
    def __init__(self, part: _Optional[int] = ..., generation: _Optional[int] = ..., candidate: _Optional[bytes] = ..., members: _Optional[int] = ..., forced: _Optional[int] = ..., founder: _Optional[bytes] = ...) -> None: ...

class HostedPart(_message.Message):
    __slots__ = ("part", "address", "term", "leads", "in_sync")
    PART_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    part: int
    address: str
    term: int
    leads: bool
    in_sync: bool
    def __init__(self, part: _Optional[int] = ..., address: _Optional[str] = ..., term: _Optional[int] = ..., leads: _Optional[bool] = ..., in_sync: _Optional[bool] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("protocol", "nonce", "card", "known", "proof", "statements")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: bytes
    card: bytes
    known: _containers.RepeatedCompositeFieldContainer[KnownCard]
    proof: bytes
    statements: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[bytes] = ..., card: _Optional[bytes] = ..., known: _Optional[_Iterable[_Union[KnownCard, _Mapping]]] = ..., proof: _Optional[bytes] = ..., statements: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KnownCard(_message.Message):
    __slots__ = ("key", "serial")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    serial: int
    def __init__(self, key: _Optional[bytes] = ..., serial: _Optional[int] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("protocol", "card", "signature", "cards", "challenge", "contradictions", "certificate", "endorsement")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CARDS_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    CONTRADICTIONS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ENDORSEMENT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    card: bytes
    signature: bytes
    cards: _containers.RepeatedScalarFieldContainer[bytes]
    challenge: bytes
    contradictions: _containers.RepeatedCompositeFieldContainer[Contradiction]
    certificate: bytes
    endorsement: bytes
    def __init__(self, protocol: _Optional[int] = ..., card: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., cards: _Optional[_Iterable[bytes]] = ..., challenge: _Optional[bytes] = ..., contradictions: _Optional[_Iterable[_Union[Contradiction, _Mapping]]] = ..., certificate: _Optional[bytes] = ..., endorsement: _Optional[bytes] = ...) -> None: ...

class Contradiction(_message.Message):
    __slots__ = ("one", "other")
    ONE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    one: bytes
    other: bytes
    def __init__(self, one: _Optional[bytes] = ..., other: _Optional[bytes] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("run", "part", "public_key", "lineage", "term", "unit", "version", "sha256")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    run: str
    part: int
    public_key: bytes
    lineage: str
    term: int
    unit: int
    version: int
    sha256: bytes
    def __init__(self, run: _Optional[str] = ..., part: _Optional[int] = ..., public_key: _Optional[bytes] = ..., lineage: _Optional[str] = ..., term: _Optional[int] = ..., unit: _Optional[int] = ..., version: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...
