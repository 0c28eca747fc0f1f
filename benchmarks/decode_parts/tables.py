"""Tables and bars of the decoding benchmark."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from benchmarks.decode_parts.hand_over import HandOver
from benchmarks.decode_parts.memory import MIB, Memory
from benchmarks.decode_parts.race import Race
from benchmarks.decode_parts.steps import AGAIN, AUTO, PLAIN, Choice, Noise, Update
from benchmarks.decode_parts.systems import CTRANSLATE2, EARLIER, GENERATE, OURS, VLLM
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report

METHOD = (
    "A Llama with random weights on one core. Systems take turns at the same prompts, in an order drawn for"
    " each repeat; ratios are taken within a repeat: median [95 % by bootstrap].",
    "Decoding is the time of 1 + n tokens less that of 1; prefill is the time of the first tokens of all"
    " prompts, greedy. A first turn of each, for one-time work, is left out.",
)
OTHERS = (GENERATE, CTRANSLATE2, VLLM, EARLIER)
WANTED_PREFILL, WANTED_NOISE, WANTED_AUTO = 1.0, 0.05, 0.98


def wanted_of_vllm(rows: int) -> float:
    """Return how many times as fast as vLLM decoding should be."""
    return 0.9 if rows == 1 else 0.8


@dataclass(slots=True)
class Found:
    """Measurements so far."""

    decodes: list[Race] = field(default_factory=list)
    prefills: list[Race] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    noises: list[Noise] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    memories: list[Memory | str] = field(default_factory=list)
    """Or why the memory was refused."""
    hand_over: HandOver | str | None = None
    """Or why it was not measured."""
    rivals: list[str] = field(default_factory=list)
    """Versions of the rivals, or why they were skipped."""

    def reports(self, quick: bool) -> list[Report]:
        """Return the tables, each with its bars, the first with the method."""
        made = [
            *([_decodes(self.decodes)] if self.decodes else []),
            *([_prefills([*self.decodes, *self.prefills])] if self.decodes or self.prefills else []),
            *([_ours(self)] if self.updates or self.noises or self.choices else []),
            *([_memories(self.memories)] if self.memories else []),
            *([_hand_over(self.hand_over)] if self.hand_over else []),
        ]
        if quick:
            made = [replace(one, bars=tuple(replace(bar, passed=None) for bar in one.bars)) for one in made]
        first, *rest = made
        return [replace(first, method=(*METHOD, *(f"Rival: {text}." for text in self.rivals))), *rest]


def line(race: Race) -> str:
    """Return a line of progress."""
    speeds = [f"{name} {median(rates):.1f}/s" for name, rates in race.rates.items() if rates]
    firsts = [f"{name} {median(seconds):.3f} s" for name, seconds in race.first_s.items()]
    equal = [f"{name} {percent(share)} equal" for name, share in race.equal.items() if name != OURS]
    return f"{race.dtype}, {race.shape}: {', '.join([*speeds, *firsts, *equal])}"


def _decodes(races: Sequence[Race]) -> Report:
    rows, bars = [], []
    for one in races:
        over = {name: one.speedup(OURS, name) for name in OTHERS if name in one.rates}
        cells = [f"{median(one.rates[name]):.1f}" if name in one.rates else "-" for name in (OURS, *OTHERS)]
        ratios = [str(over[name]) if name in over else "-" for name in OTHERS]
        equal = [percent(one.equal[name], 0) if name in one.equal else "-" for name in OTHERS]
        rows.append((f"{one.dtype}, {one.shape.rows}", *cells, *ratios, " / ".join(equal)))
        if VLLM in over:
            wanted = wanted_of_vllm(one.shape.rows)
            text = f"{one.dtype}, batch {one.shape.rows}: {over[VLLM]} of vLLM, bar {wanted:g}"
            bars.append(Bar(text, over[VLLM].middle >= wanted))
    columns = (
        "dtype, batch",
        *(OURS, *OTHERS),
        *(f"/ {name}" for name in OTHERS),
        "tokens equal to ours",
    )
    return Report("plain decoding, tokens/s", (), columns, tuple(rows), tuple(bars), _figures(races))


def _prefills(races: Sequence[Race]) -> Report:
    rows, bars = [], []
    for one in races:
        over = {name: one.speedup(OURS, name, prompts=True) for name in OTHERS if name in one.first_s}
        cells = [
            f"{median(one.first_s[name]):.3f}" if name in one.first_s else "-" for name in (OURS, *OTHERS)
        ]
        rows.append((f"{one.dtype}, {one.shape}", *cells, *(str(over.get(name, "-")) for name in OTHERS)))
        text = f"{one.dtype}, prefill {one.shape}: {over[GENERATE]} of generate, bar {WANTED_PREFILL:g}"
        bars.append(Bar(text, over[GENERATE].middle >= WANTED_PREFILL))
    columns = ("dtype, prompts x tokens", *(OURS, *OTHERS), *(f"/ {name}" for name in OTHERS))
    return Report(
        "prefill, seconds to the first tokens", (), columns, tuple(rows), tuple(bars), _figures(races)
    )


def _ours(found: Found) -> Report:
    rows: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    for update in found.updates:
        what = f"{update.dtype}, update_weights, {update.rows} live samples of {update.tokens}"
        rows.append((what, f"{update.in_steps} plain steps", _ms(update.update_s)))
    for noise in found.noises:
        what = f"{noise.dtype}, T = 1 over greedy, batch {noise.rows}"
        rows.append((what, f"+{_percents(noise.extra)} of a step", _ms(noise.sampled_s)))
        bars.append(Bar(f"{what}: +{_percents(noise.extra)}, bar 5 %", noise.extra.middle <= WANTED_NOISE))
    for choice in found.choices:
        auto, again = choice.over_plain(AUTO), choice.over_plain(AGAIN)
        what = f"{choice.dtype}, auto (suffix) / plain, T = 1, batch {choice.rows}"
        rows.append((what, f"{auto}; plain / plain {again}", f"{median(choice.rates[PLAIN]):.1f}/s plain"))
        bars.append(Bar(f"{what}: {auto}, bar {WANTED_AUTO:g}", auto.middle >= WANTED_AUTO))
    figures = {
        name: [asdict(one) for one in getattr(found, name)] for name in ("updates", "noises", "choices")
    }
    return Report("our steps", (), ("what", "ratio", "median"), tuple(rows), tuple(bars), figures)


def _memories(found: Sequence[Memory | str]) -> Report:
    known = [one for one in found if isinstance(one, Memory)]
    columns = (
        "batch",
        "reserved, MiB",
        "most tokens in use",
        "their bytes, MiB",
        "cache bytes, MiB",
        "resident, MiB",
        "cache / tokens, all steps",
        "cache at the end, MiB",
    )
    rows: list[tuple[str, ...]] = [
        (
            one.what,
            _mib(one.reserved_bytes),
            f"{one.peak.tokens:,}",
            _mib(one.peak.tokens * one.token_bytes),
            _mib(one.peak.kv_bytes),
            _mib(one.peak.rss_bytes),
            f"{one.over_tokens:.2f}",
            _mib(one.end.kv_bytes),
        )
        for one in known
    ]
    rows += [(one, *["-"] * (len(columns) - 1)) for one in found if isinstance(one, str)]
    return Report(
        "memory of keys and values",
        (),
        columns,
        tuple(rows),
        (),
        {"peaks": [asdict(one.peak) for one in known]},
    )


def _hand_over(found: HandOver | str) -> Report:
    name = "peak of a hand-over from a sharded trainer"
    if isinstance(found, str):
        return Report(name, (found,), (), (), (), {})
    rows = tuple((f"rank {rank}", _mib(peak)) for rank, peak in enumerate(found.peak_bytes))
    rows += (("largest tensor", _mib(found.largest_bytes)), ("model", _mib(found.model_bytes)))
    small = 2 * max(found.peak_bytes) <= found.model_bytes
    bars = (
        Bar(f"at most half of the model: {_mib(max(found.peak_bytes))} MiB", small),
        Bar("the engine has the trainer's weights", found.equal),
    )
    return Report(name, (), ("in the engine's dtype", "MiB"), rows, bars, asdict(found))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"


def _figures(races: Sequence[Race]) -> dict[str, object]:
    return {"races": [asdict(race) for race in races]}


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ms"


def _percents(share: Interval) -> str:
    low, high = (percent(value).removesuffix(" %") for value in (share.low, share.high))
    return f"{percent(share.middle).removesuffix(' %')} [{low}, {high}] %"
