"""How fast are the codecs on a GPU? Bar: >= 100 GB/s of fp32 for int8 and e3m0, either way.

PyTorch's own kernels, one after the other, on a vector that no cache holds; the same payloads as the NumPy
codecs, bit for bit (checked here too). Needs a CUDA device.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from aedit.proto.codecs import device_codecs
from aedit.proto.codecs.codecs import codec
from benchmarks.table import Bar, Report, main, median

WANTED_GB_S = 100.0
BARRED = ("int8", "e3m0")
NUM_CHECKED = 1_000_001


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one codec, in GB of fp32 per second."""

    encode_gb_s: float
    decode_gb_s: float
    equal_bits: bool
    """To those of the NumPy codec, both ways."""


def measure(quick: bool) -> Report | str:
    if not torch.cuda.is_available():
        return "needs a CUDA device: not run"
    numel, repeats = (2**20, 3) if quick else (2**27, 20)
    speeds = {name: _speed(name, numel, repeats) for name in device_codecs.NAMES}
    return Report(
        "codecs on one GPU",
        (
            f"{torch.cuda.get_device_name()}, {numel:,} normal fp32 numbers on the device, encoded and"
            " decoded there.",
            f"Median of {repeats} runs by CUDA events; bits compared with NumPy's on {NUM_CHECKED:,}.",
        ),
        ("codec", "encode GB/s", "decode GB/s", "bits equal NumPy's"),
        tuple(_row(name, speed) for name, speed in speeds.items()),
        tuple(_bar(name, speeds[name], quick) for name in BARRED),
        {name: asdict(speed) for name, speed in speeds.items()},
    )


def _speed(name: str, numel: int, repeats: int) -> Speed:
    x = torch.randn(numel, device="cuda")
    payload = device_codecs.encode(name, x)
    encode_s = _seconds(lambda: device_codecs.encode(name, x), repeats)
    decode_s = _seconds(lambda: device_codecs.decode(name, payload, numel), repeats)
    return Speed(4e-9 * numel / encode_s, 4e-9 * numel / decode_s, _equals_numpy(name))


def _seconds(act: Callable[[], Tensor], repeats: int) -> float:
    """Median time on the GPU of one run; the first one, which takes memory, does not count."""
    act()
    events = []
    for _ in range(repeats):
        began, ended = _event(), _event()
        began.record()
        act()
        ended.record()
        events.append((began, ended))
    torch.cuda.synchronize()
    return median([began.elapsed_time(ended) / 1e3 for began, ended in events])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _equals_numpy(name: str) -> bool:
    x = torch.randn(NUM_CHECKED, generator=torch.Generator().manual_seed(0))
    payload = bytes(codec(name).encode(x.numpy()))
    there = device_codecs.encode(name, x.cuda())
    decoded = codec(name).decode(payload, NUM_CHECKED, 0, NUM_CHECKED)
    decoded_there = device_codecs.decode(name, there, NUM_CHECKED).cpu().numpy()
    return bytes(there.cpu().numpy()) == payload and decoded_there.tobytes() == decoded.tobytes()


def _row(name: str, speed: Speed) -> tuple[str, ...]:
    equal = "yes" if speed.equal_bits else "NO"
    return name, f"{speed.encode_gb_s:.0f}", f"{speed.decode_gb_s:.0f}", equal


def _bar(name: str, speed: Speed, quick: bool) -> Bar:
    slower = min(speed.encode_gb_s, speed.decode_gb_s)
    text = f"{name}: {slower:.0f} GB/s, bar {WANTED_GB_S:.0f}; bits equal"
    return Bar(text, speed.equal_bits and (None if quick else slower >= WANTED_GB_S))


if __name__ == "__main__":
    main("codecs_gpu", "GB/s of the codecs for tensors on one GPU.", measure)
