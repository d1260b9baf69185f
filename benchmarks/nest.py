"""NEST's own instances (arXiv:2603.06798), solved exactly under its own counting, beside the answers that it gave.

    python benchmarks/nest.py --instances DIR

DIR holds files of the format "nest-instance" 1: layers with their times and bytes at each tp, levels of a network, a
batch, and what NEST answered where its program was run. Its objective, for S stages counted from the end (the last is
1), d pipelines and a devices for each stage, S a d of which there are enough:

    time = (largest load) (ceil(micro batches / d) + S - 1) + resync(d)
    load = c_in + F + c_out + B                      the last stage, and every one without recompute
         = c_in + F + max(B, c_out) + B              with recompute
    memory: k P + A + (s-1) stash, k = 2 (SGD) or 8 (Adam); stash is what enters the stage with recompute, else A

c is bytes over bandwidth plus latency on the level that joins two stages, twice that on outer levels. resync is a tree
over the pipelines on the innermost level, and an all-reduce on each outer level that joins them (`_resync`).

Loads do not depend on d, so that the least largest load of the last s stages, from each layer on, is found once for all
d (`_least_loads`); resync depends on the first stage only, which is tried in every length (`solve`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NestPlan:
    """A plan: its degrees, how many layers each stage has from first to last, and its time per batch."""

    time: float
    dp: int
    pp: int
    tp: int
    layers_per_stage: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Width:
    """One tp of an instance: sums over every stage, per (first layer, layer behind the last)."""

    tp: int
    devices: int
    run: Floats
    back: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    received_bytes: Floats
    sent_bytes: Floats

    @classmethod
    def of(cls, document: dict[str, Any]) -> _Width:
        layers, count = document["layers"], len(document["layers"])

        def sums(name: str) -> Floats:
            before = np.concatenate([[0.0], np.cumsum([layer[name] for layer in layers])])
            return before[None, :] - before[:, None]

        cut = np.zeros(count + 1)
        for source, target, size in document["edges"]:
            cut[source + 1 : target + 1] += size
        return cls(
            document["tp"],
            document["devices_per_stage"],
            sums("forward"),
            sums("backward"),
            sums("parameter_bytes"),
            sums("activation_bytes"),
            np.broadcast_to(cut[:, None], (count + 1, count + 1)),
            np.broadcast_to(cut[None, :], (count + 1, count + 1)),
        )

    @property
    def layers(self) -> int:
        return len(self.run) - 1


def _sent(instance: dict[str, Any], stage: int, devices: int, sizes: Floats) -> Floats:
    """Seconds between a stage, counted from the end, and the one before it."""
    first, block = stage * devices, 1
    for depth, level in enumerate(instance["levels"]):
        block *= level["size"]
        if (first - 1) // block == first // block:
            seconds = sizes / level["point_to_point_bandwidth"] + level["latency"]
            return np.where(sizes > 0, seconds if depth == 0 else 2 * seconds, 0.0)
    return np.where(sizes > 0, np.inf, 0.0)


def _loads(instance: dict[str, Any], width: _Width, stage: int) -> Floats:
    """The load of every stage that comes so many-th from the end; infinite where it does not fit or has no layer."""
    received = _sent(instance, stage, width.devices, width.received_bytes)
    returned = _sent(instance, stage - 1, width.devices, width.sent_bytes) if stage > 1 else 0 * width.run
    if instance["recompute"] and stage > 1:
        load = received + width.run + np.maximum(width.back, returned) + width.back
    else:
        load = received + width.run + returned + width.back
    held = {"SGD": 2, "Adam": 8}[instance["optimizer"]] * width.parameter_bytes
    stash = width.received_bytes if instance["recompute"] else width.activation_bytes
    needed = held + width.activation_bytes + (stage - 1) * stash
    is_stage = np.triu(np.ones_like(load, dtype=bool), 1)
    return np.where(is_stage & (needed <= instance["memory_bytes"]), load, np.inf)


def _resync(instance: dict[str, Any], first_stage_bytes: Floats, pipelines: int, used: int) -> Floats:
    """Seconds of summing the gradients of the first stage over the pipelines, on so many devices in all."""
    inner, *outer = instance["levels"]
    total = np.zeros_like(first_stage_bytes)
    if pipelines == 1:
        return total
    for step in range(int(math.log2(pipelines))):
        total = total + inner["latency"] + first_stage_bytes / 2**step / inner["bandwidth"]
    block, low = inner["size"], np.zeros_like(first_stage_bytes)
    for level in outer:
        if used <= block:
            break
        total = total + 2 * (level["latency"] + first_stage_bytes / level["bandwidth"]) + low
        low = low + total
        block *= level["size"]
    return total


def solve(instance: dict[str, Any]) -> NestPlan | None:
    """The optimum of NEST's objective, or None where nothing fits."""
    best: NestPlan | None = None
    for document in instance["widths"]:
        width = _Width.of(document)
        most = min(width.layers, instance["devices"] // width.devices)
        rest = np.full((most + 1, width.layers + 1), np.inf)  # least largest load of the last stages from a layer on
        rest[0, -1] = 0.0
        cuts: list[NDArray[np.int64]] = []
        for stages in range(1, most + 1):
            largest = np.maximum(_loads(instance, width, stages), rest[stages - 1][None, :])
            rest[stages] = largest.min(axis=1)
            cuts.append(largest.argmin(axis=1))
            copies = min(instance["devices"] // (width.devices * stages), instance["micro_batches"])
            for pipelines in range(1, copies + 1):
                rounds = -(-instance["micro_batches"] // pipelines) + stages - 1
                if best is not None and rest[stages, 0] * rounds >= best.time:
                    continue
                resync = _resync(instance, width.parameter_bytes[0], pipelines, width.devices * stages * pipelines)
                times = largest[0] * rounds + resync
                end = int(times.argmin())
                if best is None or times[end] < best.time:
                    lengths, at = [end], end
                    for cut in reversed(cuts[:-1]):
                        lengths.append(int(cut[at]) - at)
                        at = int(cut[at])
                    best = NestPlan(
                        time=float(times[end]), dp=pipelines, pp=stages, tp=width.tp, layers_per_stage=tuple(lengths)
                    )
    return best


def main() -> None:
    """Solve every instance and print a row each: our time over NEST's and over the known optimum, and solving times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, required=True, metavar="DIR")
    ratios, rows, answered = list[float](), 0, 0
    print(f"{'instance':<42}{'dp':>5}{'pp':>4}{'tp':>4}{'of NEST':>12}{'of exact':>12}{'seconds':>9}{'NEST s':>8}")
    for file in sorted(parser.parse_args().instances.glob("*.json")):
        try:
            instance = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(instance, dict) or instance.get("format") != "nest-instance":
                continue
            started = time.process_time()
            plan = solve(instance)
        except (ValueError, LookupError, TypeError) as error:
            print(f"{file.stem:<42} cannot be read: {type(error).__name__}: {error}")
            continue
        seconds = time.process_time() - started
        rows += 1
        nest, exact = (instance.get(name, {}).get("time") for name in ("nest", "exact"))
        if plan is None:
            print(f"{file.stem:<42} nothing fits")
            continue
        nest_s = instance.get("solving", {}).get("placement_processor_s")
        if nest is not None:
            answered += plan.time <= nest * (1 + 1e-9)
            ratios.append((nest_s or math.nan) / max(seconds, 1e-4))
        of_nest, of_exact = ("-" if other is None else f"{plan.time / other:.9f}" for other in (nest, exact))
        print(
            f"{file.stem:<42}{plan.dp:>5}{plan.pp:>4}{plan.tp:>4}{of_nest:>12}{of_exact:>12}"
            f"{seconds:>9.3f}{nest_s or math.nan:>8.1f}"
        )
    print(f"{rows} instances; at least as good as NEST on {answered} of the {len(ratios)} that it answered", end="")
    timed = [ratio for ratio in ratios if not math.isnan(ratio)]
    if timed:
        print(f", in 1/{min(timed):,.0f} to 1/{max(timed):,.0f} of its processor time", end="")
        print(f" (median 1/{np.median(timed):,.0f})", end="")
    print(".")


if __name__ == "__main__":
    main()
