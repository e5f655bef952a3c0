"""What a device can do, from its maker's data sheet, and the shares of it that real programs reach.

| device | memory | bf16 dense | memory bandwidth | link | network | source |
|---|---|---|---|---|---|---|
| A100 | 80 GB | 312 TFLOP/s | 2.039 TB/s | NVLink 600 GB/s | 200 Gbit/s | NVIDIA A100 80GB SXM data sheet (2021); DGX A100 |
| H100 | 80 GB | 989 TFLOP/s | 3.35 TB/s | NVLink 900 GB/s | 400 Gbit/s | NVIDIA H100 SXM data sheet; DGX H100 |
| H200 | 141 GB | 989 TFLOP/s | 4.8 TB/s | NVLink 900 GB/s | 400 Gbit/s | NVIDIA H200 SXM data sheet; DGX H200 |
| GB200 | 186 GB | 2,500 TFLOP/s | 8 TB/s | NVLink 1.8 TB/s over 72 | 400 Gbit/s | NVIDIA GB200 NVL72 data sheet, divided by 72 |
| CPU | 8 GB | 0.05 TFLOP/s | 0.01 TB/s | the host's memory | 10 Gbit/s | one core of a server, order of magnitude (fp32) |

Sheets give NVLink in both directions together (halved here) and FLOP/s of sparse matrices for GB200 (halved too). A100 and H100 hosts have 8 GPUs, a GB200
compute tray has 4, and 72 GPUs share one NVLink domain. Memory in decimal GB as on the sheets.
"""

import difflib
import re
from dataclasses import dataclass

from warehouse.errors import UserError


@dataclass(frozen=True)
class Device:
    """One accelerator: bytes, FLOP/s, bytes/s (memory; link and network in one direction), devices on a host and in a link domain."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    per_node: int
    domain: int

    def wire(self, devices: int) -> float:
        """Return the bytes/s at which so many devices exchange data: the link within its domain, else the network."""
        return self.link if devices <= self.domain else self.network


DEVICES = {
    device.name: device
    for device in (
        Device("A100", 80e9, 312e12, 2.039e12, 300e9, 25e9, 8, 8),
        Device("H100", 80e9, 989e12, 3.35e12, 450e9, 50e9, 8, 8),
        Device("H200", 141e9, 989e12, 4.8e12, 450e9, 50e9, 8, 8),
        Device("GB200", 186e9, 2500e12, 8e12, 900e9, 50e9, 4, 72),
        Device("CPU", 8e9, 0.05e12, 10e9, 5e9, 1.25e9, 64, 64),
    )
}


@dataclass(frozen=True)
class Efficiency:
    """Shares of the sheet's numbers that programs reach; assumptions, to be replaced by measured rates where there are any.

    train: of FLOP/s in the update (model FLOPs utilisation; PaLM reports 0.46, Llama 3 0.38 to 0.43 on H100). decode: of memory bandwidth. prefill: of FLOP/s.
    wire: of link and network. memory: of a device's memory that may be planned for. decode_overhead_s: of every decode step (launches, sampling, scheduling).
    """

    train: float = 0.4
    decode: float = 0.6
    prefill: float = 0.5
    wire: float = 0.7
    memory: float = 0.9
    decode_overhead_s: float = 0.002


def parse(text: str) -> tuple[Device, int | None]:
    """Read `64xGB200` or `GB200`; return the device and how many (None if not said). Raises UserError."""
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?([A-Za-z]\w*)", text.strip())
    kind = match[2].upper() if match else text
    if not match or kind not in DEVICES:
        near = difflib.get_close_matches(kind.upper(), DEVICES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"devices {text!r}: {hint}write COUNTxNAME as in 80xGB200, with a name of {', '.join(DEVICES)}")
    count = int(match[1]) if match[1] else None
    if count is not None and count < 2:
        raise UserError(f"devices {text!r}: at least 2 are needed, a generator and a trainer")
    return DEVICES[kind], count
