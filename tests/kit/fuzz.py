"""Invalid messages: of the right type with wild values, damaged, out of order, or noise."""

import zlib

import numpy as np
from google.protobuf.descriptor import FieldDescriptor as Field

from aedit.proto.rpc import hub_pb2 as pb

UNARY = {
    "Membership/Hello": pb.HelloRequest,
    "Membership/Join": pb.JoinRequest,
    "Membership/Heartbeat": pb.HeartbeatRequest,
    "Membership/Lease": pb.LeaseRequest,
    "Membership/TakeOver": pb.TakeOverRequest,
    "Membership/Leave": pb.LeaveRequest,
    "State/Status": pb.StatusRequest,
    "State/Confirm": pb.ConfirmRequest,
}
PULL, PUSH = "Exchange/Pull", "Exchange/Push"
WHOLE = (0, 1, 2, 7, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
REAL = (0.0, -1.0, 1.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"))
TEXT = ("", "node", "run", "fp32", "int8", "topk", "\0", "\u20ac\U0001f41f", "x" * 300, "y" * 20_000, "a\nb")
SIGNED = (Field.TYPE_SINT64, Field.TYPE_INT64)
BITS = {Field.TYPE_UINT32: 32, Field.TYPE_FIXED32: 32, Field.TYPE_UINT64: 64, Field.TYPE_FIXED64: 64}


class Wild:
    """Maker of messages that protobuf accepts and nobody else should."""

    def __init__(self, rng):
        self.rng = rng

    def wild(self, kind, depth=0):
        """Return a message with any field of the descriptor set, to anything that protobuf accepts."""
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if self.rng.random() < 0.6 and depth < 4:
                self._set(message, field, depth)
        return message

    def _set(self, message, field, depth=0):
        if field.message_type and field.message_type.GetOptions().map_entry:
            value = self._value(field.message_type.fields_by_name["value"])
            getattr(message, field.name)[self.rng.choice(TEXT)] = value
        elif field.type == Field.TYPE_MESSAGE:
            for _ in range(self.rng.randint(0, 3) if field.is_repeated else 1):
                value = self.wild(field.message_type._concrete_class, depth + 1)
                part = getattr(message, field.name)
                (part.append if field.is_repeated else part.CopyFrom)(value)
        elif field.is_repeated:
            getattr(message, field.name).extend(self._value(field) for _ in range(self.rng.randint(0, 3)))
        else:
            setattr(message, field.name, self._value(field))

    def one_wild_field(self, message):
        self._set(message, self.rng.choice(message.DESCRIPTOR.fields))

    def _value(self, field):
        if field.type in BITS:
            return self.rng.choice([*WHOLE, 1000 + self.rng.getrandbits(16)]) % 2 ** BITS[field.type]
        if field.type == Field.TYPE_BOOL:
            return self.rng.random() < 0.5
        if field.type in SIGNED:
            return self.rng.choice(WHOLE) % 2**63 - self.rng.choice([0, 2**63])
        if field.type in (Field.TYPE_DOUBLE, Field.TYPE_FLOAT):
            return self.rng.choice(REAL)
        return self.rng.choice(TEXT) if field.type == Field.TYPE_STRING else self.rng.randbytes(9)

    def spoilt(self, message, chance):
        """Return the message with some bytes changed, lost or added."""
        if self.rng.random() >= chance:
            return message
        damaged = bytearray(message or b"x")
        for _ in range(self.rng.randint(1, 4)):
            damaged[self.rng.randrange(len(damaged))] = self.rng.getrandbits(8)
        return bytes(damaged[: self.rng.randint(0, len(damaged))]) + self.rng.randbytes(
            self.rng.choice([0, 3])
        )


class Fuzzer(Wild):
    """Generator of invalid messages: `call()` returns a method and the messages to send to it.

    Most of them come from `who`, a member that has sent `join`.
    """

    def __init__(self, rng, numels, join):
        super().__init__(rng)
        self.numels, self.join, self.who = numels, join, pb.Who(run="run")
        self.seqs, self.versions = [0] * len(numels), [1] * len(numels)

    def call(self):
        method = self.rng.choice([*UNARY, PULL, PULL, PUSH, PUSH, PUSH, PUSH])
        if method == PUSH:
            return method, [self.spoilt(message, 0.1) for message in self._push()]
        request = self._nearly(method) or self.wild(UNARY.get(method, pb.PullRequest))
        if self.rng.random() < 0.7 and hasattr(request, "who") and method != "Membership/Leave":
            request.who.CopyFrom(self.who)
        return method, [self.spoilt(request.SerializeToString(), 0.2)]

    def _nearly(self, method):
        """Return a valid message of a member with one field changed; None if there is none for the method."""
        near = {"Membership/Join": self.join, PULL: pb.PullRequest(unit=self.rng.randrange(len(self.numels)))}
        if method not in near or self.rng.random() < 0.3:
            return None
        request = type(near[method])()
        request.CopyFrom(near[method])
        self.one_wild_field(request)
        return request

    # --- pushes

    def _push(self):
        unit = self.rng.randrange(len(self.numels))
        data = self._numbers(self.numels[unit])
        head = pb.PushHead(
            who=self.who, unit=unit, seq=self.seqs[unit] + 1, base=self.versions[unit], steps=1
        )
        head.tokens, head.codec, head.num_bytes = 10, "fp32", len(data)
        for _ in range(self.rng.choice([0, 1, 1, 1, 2])):
            self.one_wild_field(head)
        if self.rng.random() < 0.95:  # one number too high, and all that follow are used up
            head.seq = self.seqs[unit] + 1
        chunks = self._chunks(head.SerializeToString(), data)
        for _ in range(self.rng.choice([0, 0, 1])):
            self.one_wild_field(self.rng.choice(chunks))
        if self.rng.random() < 0.2:
            self._reorder(chunks)
        return [chunk.SerializeToString() for chunk in chunks]

    def _numbers(self, numel):
        values = np.full(numel, self.rng.gauss(0, 0.01), np.float32)
        bad = self.rng.choice([None, None, None, float("nan"), float("inf"), 3e38])
        if bad is not None:
            values[self.rng.randrange(numel)] = bad
        size = self.rng.choice([4 * numel] * 4 + [0, 4 * numel - 1, 4 * numel - 4])
        return values.tobytes()[:size]

    def _chunks(self, head, data):
        size = self.rng.choice([max(1, len(data)), max(1, len(data) // 2), max(1, len(data) // 3)])
        pieces = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        heads = [head] + [b""] * (len(pieces) - 1)
        return [
            pb.Chunk(offset=i * size, data=piece, head=first, crc=zlib.crc32(first, zlib.crc32(piece)))
            for i, (piece, first) in enumerate(zip(pieces, heads, strict=True))
        ]

    def _reorder(self, chunks):
        """Repeat a chunk, drop one, or reverse their order, in place."""
        what = self.rng.randrange(3)
        if what == 0:
            chunks.append(chunks[self.rng.randrange(len(chunks))])
        elif what == 1:
            del chunks[self.rng.randrange(len(chunks))]
        else:
            chunks.reverse()
