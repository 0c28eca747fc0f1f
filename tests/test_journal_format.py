"""Tests that docs/protocol.md describes the journal: a parser made of its tables reads that of a real hub.

Nothing here reads a journal by the code of the hub, and all arithmetic is that of the page.
"""

import hashlib
import json
import re
import shutil
import struct
import tomllib
import zlib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from kit.hub_processes import Client
from kit.leading_hub import leading_hub
from kit.waiting import until

from aedit.async_sgd.journal import File, Payload
from aedit.async_sgd.journal.encoding import encode_records
from aedit.async_sgd.rules import MergePart, Push, Record, records
from aedit.proto.codecs import codec
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import Layout, TensorLayout, UnitLayout

LIMIT_S = 120.0
PAGE = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()


class Wrong(Exception):
    """A file is not what the page says."""


def need(is_right, text):
    if not is_right:
        raise Wrong(text)


def table(page, *header):
    """Return the rows of the table with this header."""
    lines = page.split("| " + " | ".join(header) + " |\n")[1].splitlines()[1:]
    rows = [re.split(r" \| ", line[2:-2]) for line in lines[: next(i for i, x in enumerate(lines) if not x)]]
    return [[cell.strip("`") for cell in row] for row in rows]


def layout_of(page, title):
    """Return the struct of a table of offsets, and the names of its fields."""
    code, names, at = "<", [], 0
    for offset, size, kind, field in table(page, "offset", "bytes", "type", title):
        need(int(offset) == at, f"{title}: {field} is at {offset}, and the fields before it end at {at}")
        at += int(size)
        code += {"1": "B", "2": "H", "4": "I", "8": "Q"}[size] if kind == "integer" else f"{size}s"
        names.append(field.partition(":")[0])
    return struct.Struct(code), names


class Format:
    """The parser that the tables of a page describe."""

    def __init__(self, page=PAGE):
        self.head, self.head_names = layout_of(page, "file head")
        self.frame, self.frame_names = layout_of(page, "frame header")
        self.kinds = {int(kind): name for kind, name, _ in table(page, "frame", "name", "body")}
        self.records = {kind: fields_of(text) for kind, text in table(page, "record", "fields")}
        self.types = dict(table(page, "type", "content"))
        self.place = fields_of(re.search(r"object with (.*?): a PAYLOAD", self.types["place"])[1])
        self.objects = {
            name: {word.rstrip("?"): ("any", word.endswith("?")) for word in text.split()}
            for name, text in table(page, "object", "fields")
        }

    def file_head(self, data):
        need(len(data) >= self.head.size, "no head")
        head = dict(zip(self.head_names, self.head.unpack_from(data), strict=True))
        need(head["format"] == b"aedit-2\n", "another format")
        need(head["crc"] == zlib.crc32(data[: self.head.size - 4]), "CRC of the head")
        return head

    def frames(self, data):
        """Yield the name, the start and the end of the body, and the header of each frame."""
        mark, at = self.file_head(data)["mark"], self.head.size
        while at < len(data):
            header = data[at : at + self.frame.size]
            need(len(header) == self.frame.size, "a header is cut off")
            one = dict(zip(self.frame_names, self.frame.unpack(header), strict=True))
            need(one["mark"] == mark, f"mark at {at}")
            need(one["crc"] == zlib.crc32(header[:-4]), f"CRC of the header at {at}")
            need(set(one["padding"]) == {0}, f"padding at {at}")
            need(one["synced"] <= at, f"synced at {at}")
            start, end = at + self.frame.size, at + self.frame.size + one["length"]
            name = self.kinds[one["kind"]]
            wanted = 0 if name == "PAYLOAD" else zlib.crc32(data[start:end])
            need(end <= len(data) and one["body"] == wanted, f"CRC of the body at {start}")
            yield name, start, end, one
            at = end

    def batches(self, data):
        """Yield what was decided together, of a segment."""
        for name, start, end, _ in self.frames(data):
            need(name in ("RECORDS", "PAYLOAD"), f"{name} in a segment")
            if name == "RECORDS":
                batch = json.loads(data[start:end])
                for record in batch:
                    self.check_record(record)
                yield batch

    def chain(self, data):
        found = hashlib.sha256(data[: self.head.size])
        for name, start, end, _ in self.frames(data):
            if name == "RECORDS":
                found.update(data[start - self.frame.size : end])
        return found.digest()

    def payload(self, data, place):
        found = data[place["at"] : place["at"] + place["length"]]
        need(zlib.crc32(found) == place["crc"], f"payload at {place['at']}")
        return decoded(place["codec"], found, place["numel"])

    def check_record(self, record):
        need(record.get("kind") in self.records, f"kind of {record}")
        plain = {name: value for name, value in record.items() if name != "kind"}
        self.check_fields(plain, self.records[record["kind"]], record)

    def check_fields(self, found, fields, where):
        missing = {name for name, (_, optional) in fields.items() if not optional} - found.keys()
        need(not missing and found.keys() <= fields.keys(), f"fields of {where}: {fields}")
        for name, value in found.items():
            need(self.is_of(value, fields[name][0]), f"{name} of {where} is no {fields[name][0]}")

    def is_of(self, value, kind):
        match kind:
            case "any":
                return True
            case "int":
                return type(value) is int
            case "float":
                return type(value) in (int, float)
            case "str" | "bool":
                return type(value).__name__ == kind
            case "ints" | "floats":
                return isinstance(value, list) and all(self.is_of(one, kind[:-1]) for one in value)
            case "place":
                self.check_fields(value, self.place, "place")
                return True
            case "pairs":
                return all([type(a), type(b)] == [str, str] for a, b in value)
            case "layout":
                return all(self.is_of(shape, "ints") for _, tensors in value for _, shape in tensors)
            case "parts":
                names = re.search(r"\[(.*)\]", self.types["parts"])[1].split(", ")
                return all(len(part) == len(names) for part in value)
        raise Wrong(f"the page has no type {kind}")

    def snapshot(self, data):
        """Return the numbers of a snapshot, and of each unit numbers, arrays, and pending pushes."""
        frames, units = list(self.frames(data)), {}
        need([frames[0][0], frames[-1][0]] == ["HEAD", "END"], "order of the frames of a snapshot")
        bodies = [(name, data[start:end]) for name, start, end, _ in frames]
        numbers, rest = json.loads(bodies[0][1]), iter(bodies[1:-1])
        self.check_fields(numbers, self.objects["HEAD"], "HEAD")
        for name, body in rest:
            need(name == "UNIT", f"{name} where a UNIT belongs")
            unit = json.loads(body)
            self.check_fields(unit, self.objects["UNIT"], "UNIT")
            self.check_fields(unit["numbers"], self.objects["UNIT.numbers"], "UNIT.numbers")
            arrays = {}
            for array in unit["arrays"]:
                name, body = next(rest)
                need(name == "ARRAY", f"{name} where an ARRAY belongs")
                arrays[array] = np.frombuffer(body, "<f4")
            pushes = {}
            for push in unit["pending"]:
                self.check_fields(push, self.records["Accepted"], push)
                name, body = next(rest)
                need(name == "PAYLOAD" and zlib.crc32(body) == push["values"]["crc"], "a pending push")
                pushes[push["node"], push["seq"]] = decoded(
                    push["values"]["codec"], body, push["values"]["numel"]
                )
            units[unit["index"]] = unit["numbers"], arrays, pushes
        return numbers, units


def fields_of(text):
    """Return type and whether it may be missing, by name, of a list such as `a:int b:float?`."""
    found = (word.split(":") for word in text.split())
    return {name: (kind.rstrip("?"), kind.endswith("?")) for name, kind in found}


# --- encoded arrays, by the page


def from_bf16(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decoded(name, data, n):
    """Return the n values of a payload, fp32."""
    if name == "fp32":
        return np.frombuffer(data, "<f4", n)
    if name == "bf16":
        return from_bf16(np.frombuffer(data, "<u2", n))
    if name == "topk":
        return np.concatenate([places_of(chunk, width) for chunk, width in chunks(data, n)])
    num = -(-n // 256)
    scale_n = from_bf16(np.repeat(np.frombuffer(data, "<u2", num), 256)[:n])
    if name == "int8":
        return scale_n * np.frombuffer(data, np.int8, n, 2 * num).astype(np.float32)
    byte = np.frombuffer(data, np.uint8, offset=2 * num)
    if name == "ternary":
        sizes = [-(-min(4096, n - first) // 5) for first in range(0, n, 4096)]
        grains = np.split(byte, np.cumsum(sizes)[:-1])
        codes = [(grain[:, None] // [1, 3, 9, 27, 81] % 3).reshape(-1)[:4096] for grain in grains]
        return scale_n * np.array([0, 1, -1], np.float32)[np.concatenate(codes)[:n]]
    code_n = np.stack([byte & 15, byte >> 4], axis=1).reshape(-1)[:n].astype(int)
    size_n = np.where(code_n & 7, 2.0 ** ((code_n & 7) - 7), 0.0) * np.where(code_n & 8, -1, 1)
    return scale_n * size_n.astype(np.float32)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "e3m0", "ternary", "topk"])
@pytest.mark.parametrize("numel", [1, 4096, 9003])
def test_a_payload_is_read_by_the_table_of_the_page(name, numel):
    x = np.random.default_rng(numel).standard_normal(numel, np.float32)
    data = bytes(codec(name).encode(x))
    np.testing.assert_array_equal(decoded(name, data, numel), codec(name).decode(data, numel, 0, numel))


def chunks(data, n):
    at = 0
    for first in range(0, n, 4096):
        width = min(4096, n - first)
        k = -(-192 * width // 4096)
        low = min(range(13), key=lambda l: k * l + ((width - 1) >> l))  # noqa: E741 - the page's letter
        size = 4 + 2 * -(-k // 8) + -(-(k * low + k + ((width - 1) >> low)) // 8)
        yield (data[at : at + size], k, low), width
        at += size


def places_of(chunk, width):
    """Return the values of one record of `topk`."""
    data, k, low = chunk
    levels = from_bf16(np.frombuffer(data, "<u2", 2))
    step = -(-k // 8)

    def bits(at, num):
        return np.unpackbits(np.frombuffer(data, np.uint8, num, at), bitorder="little")

    high, negative = bits(4, step)[:k], bits(4 + step, step)[:k]
    rest = bits(4 + 2 * step, len(data) - 4 - 2 * step)
    lower = rest[: k * low].reshape(k, low) @ (1 << np.arange(low))
    upper = np.flatnonzero(rest[k * low :])[:k] - np.arange(k)
    out = np.zeros(width, np.float32)
    out[(upper << low) + lower] = levels[high] * np.where(negative, -1, 1).astype(np.float32)
    return out


def through_int8(x):
    """Return x as int8 has it."""
    padded = np.concatenate([x, np.zeros(-x.size % 256, np.float32)]).reshape(-1, 256)
    scale = from_bf16(to_bf16(np.abs(padded).max(1) * (np.float32(1) / np.float32(127))))[:, None]
    q = np.rint(padded / np.where(scale > 0, scale, np.float32(np.inf)))
    return (scale * q.astype(np.float32)).reshape(-1)[: x.size]


# --- how versions follow from records, by the page


class Unit:
    """Anchor and outer state of a unit. dtype: fp32 for the hub's own bits, or float64."""

    def __init__(self, x, dtype):
        self.x, self.version, self.dtype = x.astype(dtype), 1, dtype
        self.u, self.P, self.n = np.zeros_like(self.x), np.zeros_like(self.x), 0

    def merge(self, record, pushes, settings):
        outer, clip = settings["outer"], settings["edit"]["penalty"]["clip"]
        lr, mu, delay = outer["lr"], outer.get("momentum", 0.85), outer.get("delay", 4)
        parts = sorted((node, seq, w, s) for node, seq, w, s, _ in record["parts"] if w > 0)
        total = sum(w for *_, w, _ in parts)
        need(parts, "these pushes have weight")
        g = np.zeros_like(self.x)
        for node, seq, w, s in parts:
            g = g + pushes[node, seq].astype(self.dtype) * self.dtype(w * s / total)
        share, kind = record.get("share"), outer["kind"]
        c = 1.0 if clip == "none" else min(1.0, clip / np.sqrt((g.astype(np.float64) ** 2).sum()))
        c *= 1.0 if share is None else share * (delay if kind == "delayed-nesterov" else 1)
        g = g * self.dtype(c)
        s = 1.0 if share is None else share
        a, x, u = mu * (1 - mu**s) / (1 - mu), self.x, self.u
        match kind:
            case "average":
                x = x - g * lr
            case "nesterov":
                u = u * mu**s + g
                x = x - (u * a + g) * lr
            case "heloco":
                u = u * mu**s + g * (1 - mu)
                x = x - ((u * a + g * (1 - mu)) * lr + g * (lr * mu))
            case "delayed-nesterov":
                N, c = delay, outer["activation"]
                self.P, self.n = g + self.P, self.n + 1
                if self.n < N:
                    share_of_u = c
                else:
                    u, share_of_u = u * mu + self.P * (1 / N), 1 - c * N + c
                    self.P, self.n = np.zeros_like(g), 0
                x = x - (g * (lr / N) + u * (lr * mu * share_of_u))
        if settings["hub"].get("codec_down") == "int8":
            x = self.x + through_int8((x - self.x).astype(np.float32)).astype(self.dtype)
        self.x, self.u, self.version = x.astype(self.dtype), u.astype(self.dtype), self.version + 1


# --- real hubs

RUN = """
name = "run"
dir = "{dir}"
[train]
steps = 100000
[edit]
every = 10
landing = "arrival"
[hub]
address = "127.0.0.1:0"
expire_s = {expire_s}
snapshot_bytes = {snapshot_bytes}
push_filter = {{ threshold = 1e9, cosine = false, clip = 1.5 }}
{more}
"""

CASES = {
    "nesterov": """codec = "bf16"
quorum = 2
[outer]
kind = "nesterov"
lr = 0.7
momentum = 0.9
[edit.penalty]
clip = 0.5
""",
    "delayed-nesterov": """codec = "int8"
grace = 0.0
[outer]
kind = "delayed-nesterov"
lr = 0.6
delay = 2
activation = 0.25
[edit.penalty]
clip = 3.0
""",
    "average": """codec = "e3m0"
codec_down = "int8"
quorum = "all"
[outer]
kind = "average"
lr = 0.9
[edit.penalty]
clip = "none"
""",
    "heloco": """codec = "topk"
grace = 0.0
[outer]
kind = "heloco"
lr = 0.5
momentum = 0.8
correction = 0.0
[edit.penalty]
clip = "none"
""",
}


class Pushing(Client):
    """A node that pushes in the codec of its run, and says with `consumed` what the push has used."""

    codec = "fp32"
    consumed = ()

    def push(self, unit, base=None, scale=0.01):
        if base == 0:
            return super().push(unit, 0)
        self.seqs[unit] += 1
        rng = np.random.default_rng([self.who.node, unit, self.seqs[unit]])
        values = rng.standard_normal(self.numels[unit], np.float32) * np.float32(scale)
        data = codec(self.codec).encode(values)
        head = pb.PushHead(who=self.who, unit=unit, seq=self.seqs[unit], base=self.version(unit))
        head.steps, head.tokens, head.codec, head.num_bytes = 1 + self.who.node, 10, self.codec, len(data)
        head.consumed.extend(self.consumed)
        reply = self.hub.push(head, data)
        assert reply.accepted, reply
        return reply


@pytest.fixture(scope="module", params=CASES)
def run(request, tmp_path_factory):
    """Return the folder of a hub that took pushes of two nodes, its settings, and the last anchors."""
    folder, settings = tmp_path_factory.mktemp("run"), tomllib.loads("[hub]\n" + CASES[request.param])
    with leading_hub(folder, CASES[request.param], template=RUN) as hub:
        nodes = [Pushing(hub.address, name) for name in ("a", "b")]
        for node in nodes:
            node.codec = settings["hub"]["codec"]
        nodes[0].found()
        nodes[1].join()
        for turn in range(5):
            for node in nodes:
                for unit in range(2):
                    node.push(unit, scale=0.01 * (1 + turn))
                if turn == 2 and node is nodes[0]:
                    hub.leading.ledger.snapshot()
            for node in nodes:
                for unit in range(2):
                    until(lambda n=node, u=unit: n.news(u).seq >= n.seqs[u], "the merges", LIMIT_S)
        anchors = [nodes[0].anchor(unit) for unit in range(2)]
        for node in nodes:
            node.hub.close()
        shutil.copytree(folder / "hub", folder / "copy")  # at its end a hub deletes what it needs no more
    return folder / "copy", settings, anchors


def segments(folder):
    return [path.read_bytes() for path in sorted(folder.glob("journal-*")) if path.name[8:].isdecimal()]


def audited(form, data, settings, dtype, units, pushes):
    """Return the units after one more segment; `pushes` are added to."""
    for record in (record for batch in form.batches(data) for record in batch):
        unit = record.get("unit")
        if record["kind"] == "Accepted":
            pushes.setdefault(unit, {})[record["node"], record["seq"]] = form.payload(data, record["values"])
        elif record["kind"] == "Merged" and record["version"] == 1:
            ((node, seq, *_),) = record["parts"]
            units[unit] = Unit(pushes[unit][node, seq], dtype)
        elif record["kind"] == "Merged":
            assert record["version"] == units[unit].version + 1
            units[unit].merge(record, pushes[unit], settings)
    return units


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_anchors_are_recomputed_from_the_accepted_pushes(run, dtype):
    folder, settings, anchors = run
    form, units, pushes = Format(), {}, {}
    assert len(segments(folder)) > 1
    for data in segments(folder):
        audited(form, data, settings, dtype, units, pushes)
    for unit, (version, values) in enumerate(anchors):
        assert units[unit].version == version >= 6
        if dtype is np.float32:  # to the last bit
            assert units[unit].x.tobytes() == values.tobytes()
        else:
            step = (
                2e-3 if "codec_down" in settings["hub"] else 1e-6
            )  # a value may be rounded to the next code
            np.testing.assert_allclose(units[unit].x, values, rtol=1e-5, atol=step)
        assert np.abs(values - pushes[unit][0, 1]).max() > 0.01, "the pushes have moved the anchor"


def test_a_snapshot_has_the_state_between_two_segments(run):
    folder, settings, anchors = run
    form, units, pushes = Format(), {}, {}
    for number, data in enumerate(segments(folder), 1):
        path = folder / f"snapshot-{number:08d}"
        if path.exists():
            numbers, saved = form.snapshot(path.read_bytes())
            assert sorted(saved) == sorted(units) == [0, 1]
            assert [member["name"] for member in numbers["members"]] == ["a", "b"]
            for index, (plain, arrays, pending) in saved.items():
                unit = units[index]
                assert (plain["version"], plain["count"]) == (unit.version, unit.n)
                assert arrays["values"].tobytes() == unit.x.tobytes()
                assert arrays["momentum"].tobytes() == unit.u[: arrays["momentum"].size].tobytes()
                if "pending" in arrays:
                    assert arrays["pending"].tobytes() == unit.P.tobytes()
                for key, values in pending.items():
                    assert np.array_equal(values, pushes[index][key])
                is_awaited = settings["hub"].get("quorum") == "all"
                assert [node for node, _ in pending] == [0] or not is_awaited
        audited(form, data, settings, np.float32, units, pushes)
    assert len(list(folder.glob("snapshot-*"))) == 1
    assert [values.tobytes() for _, values in anchors] == [units[i].x.tobytes() for i in range(2)]


def test_segments_and_snapshots_name_what_was_before_them(run):
    folder, _, _ = run
    form, files = Format(), segments(folder)
    heads = [form.file_head(data) for data in files]
    assert heads[0]["before"] == 0
    assert heads[0]["chain"] == bytes(32)
    for data, after in zip(files, heads[1:], strict=False):
        assert (after["before"], after["chain"]) == (len(data), form.chain(data))
    for number, head in enumerate(heads, 1):
        path = folder / f"snapshot-{number:08d}"
        saved = form.file_head(path.read_bytes()) if path.exists() else head
        assert [saved[name] for name in ("before", "seed", "chain")] == [
            head[name] for name in ("before", "seed", "chain")
        ]
    note = json.loads((folder / "journal.json").read_text())
    epoch = hashlib.sha256(b"epoch" + heads[0]["seed"]).hexdigest()[:16]
    assert note == {"epoch": epoch, "segment": len(files)}


# --- the page and the code cannot part


def test_every_kind_of_record_is_written_with_the_fields_of_the_page(tmp_path):
    path = tmp_path / "file"
    place = Payload("fp32", 1, 0, File(path, create=True), 72, 4)
    push = Push(node=0, unit=0, seq=1, base=0, steps=1, tokens=1, values=place, norms=(float("nan"),))
    layout = Layout((UnitLayout("u", (TensorLayout("w", (1,)),)),))
    made = [
        records.Founded(layout, (("seed", "0"),), 9),
        records.Joined("a", 0, 1, "", 0.0),
        records.Left(0, "left"),
        records.Accepted(push),
        records.Refused(0, 0, 1, "stale", False, False),
        records.Garbled(0, 0, "malformed"),
        records.Merged(0, 2, (MergePart(0, 1, 1.0),), 0.5),
        records.Merged(0, 2, (MergePart(0, 1, 1.0),), 0.5, 0.25),
        records.Mixed(0, 2, place, 0.25),
        records.SentUp(0, 2),
        records.RoundOpened(1, 0.5),
        records.Leased(0, 0, 9),
        records.Used(0, 0, 9),
        records.Led(1),
        records.Configured(1, 1, 5, (5,), (6,)),
        records.Agreed(1, 1),
        records.Ticked(1.0),
        records.Banned("s", "00", "liar", 0.5),
    ]
    assert {type(record) for record in made} == set(get_args(Record))
    form = Format()
    assert form.records.keys() == {type(record).__name__ for record in made}
    for record in json.loads(encode_records(made)):
        form.check_record(record)


SIZES = [
    (title, row) for title in ("file head", "frame header") for row in range(6 if title == "file head" else 7)
]


@pytest.mark.parametrize(("title", "changed"), SIZES)
def test_a_parser_of_a_page_with_another_size_reads_no_journal(run, title, changed):
    """So these tests read the page, and not what they know of the code."""
    header = f"| offset | bytes | type | {title} |\n"
    before, after = PAGE.split(header)
    lines, at = after.splitlines(keepends=True), 0
    for i, (_, size, *rest) in enumerate(table(PAGE, "offset", "bytes", "type", title)):
        size = int(size) if i != changed else int(size) // 2 if int(size) > 4 else 2 * int(size)
        lines[1 + i] = f"| {at} | {size} | " + " | ".join(rest) + " |\n"
        at += size
    assert len(table(PAGE, "offset", "bytes", "type", title)) == max(i for t, i in SIZES if t == title) + 1
    form = Format(before + header + "".join(lines))
    with pytest.raises(Wrong):
        list(form.batches(segments(run[0])[0]))


def test_the_use_of_samples_is_in_the_frame_of_the_accepted_push(tmp_path):
    """A hub that is killed between two frames has both or neither."""
    with leading_hub(tmp_path, 'codec = "fp32"', template=RUN) as hub:
        node = Pushing(hub.address, "a").found()
        leases = node.hub.lease(pb.LeaseRequest(who=node.who, samples=64)).blocks
        start = leases[0].start
        for number, upto in enumerate((start + 10, start + 30)):
            node.consumed = [pb.Consumed(start=start, upto=upto)]
            node.push(number % 2)
        until(lambda: node.news(1).seq >= node.seqs[1], "the merges", LIMIT_S)
        with hub.leading.ledger.lock:
            found = segments(tmp_path / "hub")
        node.hub.close()
    form = Format()
    batches = [batch for data in found for batch in form.batches(data)]
    kinds = [[record["kind"] for record in batch] for batch in batches]
    assert [batch for batch in kinds if "Used" in batch] == [["Accepted", "Used"]] * 2
    used = [record for batch in batches for record in batch if record["kind"] == "Used"]
    assert [(record["start"], record["upto"]) for record in used] == [
        (start, start + 10),
        (start, start + 30),
    ]
