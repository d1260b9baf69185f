"""How a library runs collectives on a GPU's own links: protocols, each with its start, steps and rate, as measured.

Inside of a node or rack the library has several protocols (NCCL: LL, LL128, Simple) and takes the quickest for a size.
With n devices, links of b bytes a second and direction, and a collective that sends the share h of a tensor of S bytes
in r steps one after the other (`phaze.cost.collective_prices`), protocol j takes

    start_j + r step_j + h S / (b share_j),     r = n - 1 for all-gather and reduce-scatter, 2 (n - 1) for all-reduce,
                                                1 for all-to-all and for a message, whose pairs talk at once

and the collective the least of these; an all-to-all reaches the share `exchanged` of a protocol's rate. So time grows
with size and count, and the rate grows slowly with size, as it does on the machines.

``hardware/data/kernels.json`` has the numbers of each chip; `benchmarks/kernels.py` fits them and prints the errors.
They hold for links of the bandwidth that they were measured on: a cluster whose innermost links are other ones, rows of
a torus and links between nodes keep latency and bandwidth as the network says them.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaze.hardware import Accelerator, InterconnectLevel
from phaze.hardware.field_checks import fraction, non_negative, positive
from phaze.hardware.packaged_data import packaged_table

__all__ = ["LinkProtocol", "LinkProtocols", "link_protocols_of", "linked_chips"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProtocol:
    """One way to run collectives: seconds before the first step, seconds of a step, and the share of the bandwidth."""

    start_s: float
    step_s: float
    share: float

    def __post_init__(self) -> None:
        """Check ranges."""
        non_negative("link protocol", "start_s", self.start_s)
        non_negative("link protocol", "step_s", self.step_s)
        fraction("link protocol", "share", self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProtocols:
    """The protocols of a chip's links, the bandwidth of these, and what all-to-alls reach of a protocol's rate."""

    bandwidth_bytes_per_s: float
    protocols: tuple[LinkProtocol, ...]
    exchanged: float

    def __post_init__(self) -> None:
        """Check ranges."""
        positive("link protocols", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        fraction("link protocols", "exchanged", self.exchanged)
        positive("link protocols", "number of protocols", len(self.protocols))

    @property
    def bulk(self) -> LinkProtocol:
        """The protocol of large tensors: the one with the highest rate."""
        return max(self.protocols, key=lambda protocol: protocol.share)

    def hold_for(self, level: InterconnectLevel) -> bool:
        """Whether links are those that were measured."""
        return not level.links.is_row and level.bandwidth_bytes_per_s == self.bandwidth_bytes_per_s


def linked_chips() -> tuple[str, ...]:
    """The chips whose collectives were measured."""
    return tuple(chip for entry in packaged_table("kernels")["collectives"].values() for chip in entry["chips"])


def link_protocols_of(accelerator: Accelerator) -> LinkProtocols | None:
    """The measured protocols of the chip that has this name; None where there are none."""
    entries = packaged_table("kernels")["collectives"].values()
    entry = next((entry for entry in entries if accelerator.name in entry["chips"]), None)
    if entry is None:
        return None
    return LinkProtocols(
        bandwidth_bytes_per_s=entry["bandwidth_bytes_per_s"],
        protocols=tuple(LinkProtocol(**protocol) for protocol in entry["protocols"]),
        exchanged=entry["exchanged"],
    )
