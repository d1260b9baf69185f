"""Plans and tables as plain text: a plan in a terminal within 100 columns, its explanation, and any table as CSV."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

from phaze.ir import BUDGET_MODES
from phaze.objective import ObjectiveKind
from phaze.parallelism import HOST_WORDS, MIXED_SEQUENCES, Offload, Parallelism
from phaze.plan.plan import Plan, PlanStatus, RunnerUp, Stage, StageLayer
from phaze.plan.plan_integrity import BESIDE_ITEMS
from phaze.printable_text import with_printable_text
from phaze.tolerances import EQUAL_RESULTS

__all__ = [
    "csv_text",
    "degrees_text",
    "explanation",
    "objective_text",
    "percent_up",
    "provenance_lines",
    "reached_text",
    "seconds_text",
    "strategy_text",
    "summary",
    "verdict",
    "zero_text",
]

COLUMNS = 100
MOST_STAGES = 16
_HEADINGS = ("stage", "layers", "devices", "recompute", "forward", "backward", "memory", "of it", "fit")


def summary(plan: Plan) -> str:
    """What to do, how fast it is, how full devices get, and how far from the bound."""
    plan = with_printable_text(plan)
    parts, total = plan.step_time_parts, plan.step_time_s
    named = (
        ("compute", parts.compute_s),
        ("exposed communication", parts.exposed_communication_s),
        ("bubble", parts.bubble_s),
        ("update", parts.update_s),
    )
    unit = "tokens" if plan.model.tokens_per_sample > 1 else "samples"
    lines = [
        *_paragraph("", _title(plan)),
        *_paragraph("strategy  ", strategy_text(plan.strategy)),
        *_paragraph(
            "step      ",
            f"{seconds_text(total)} for {plan.question.global_batch_size:,} samples: {plan.tokens_per_s:,.0f} {unit}/s,"
            f" MFU {plan.mfu:.1%}, about {plan.energy['per_token_j']:.3g} J per {unit[:-1]}",
        ),
        *_paragraph("of it     ", ", ".join(f"{name} {seconds_text(s)} ({s / total:.1%})" for name, s in named)),
        *(_paragraph("objective ", text) if (text := objective_text(plan)) else ()),
        *_paragraph("proof     ", verdict(plan)),
        *_paragraph(
            "prices    ",
            f"{plan.provenance.prices}{_unpriced(plan)}; {certainty_text(plan)}; target {plan.provenance.target}",
        ),
        *_host_lines(plan),
        "",
        *_stage_table(plan.stages),
    ]
    return "\n".join(lines)


def _host_lines(plan: Plan) -> list[str]:
    """What is kept on hosts, where something is."""
    kept, host = max(stage.memory_bytes.get("host", 0.0) for stage in plan.stages), plan.cluster.host
    if not kept or host is None:
        return []
    what = HOST_WORDS[plan.strategy.offload]
    text = f"up to {kept / 2**30:.1f} of {host.memory_bytes / 2**30:.0f} GiB for each device, {what}"
    return _paragraph("on hosts  ", text)


def objective_text(plan: Plan) -> str:
    """What was made small where that is not the step time, and what a step costs where a price is known."""
    objective, devices = plan.question.objective, plan.cluster.device_count
    texts = []
    if objective.chooses_devices:
        limit_s = objective.step_time_s
        asked = "" if limit_s is None else f" whose steps take at most {seconds_text(limit_s)}"
        texts.append(f"the least {_OBJECTIVE_WORDS[objective.kind]}{asked}, on {devices} of up to {_most(plan)}")
    tokens = plan.question.global_batch_size * plan.model.tokens_per_sample
    money = objective.money(devices * plan.step_time_s, tokens)
    if money is not None:
        unit = "tokens" if plan.model.tokens_per_sample > 1 else "samples"
        texts.append(f"{money:.4g} per million {unit} at {objective.price:.6g} per device-hour")
    return "; ".join(texts)


_OBJECTIVE_WORDS = {
    ObjectiveKind.THROUGHPUT: "step time",
    ObjectiveKind.COST: "cost",
    ObjectiveKind.ENERGY: "energy",
    ObjectiveKind.DEVICES: "number of devices",
}
"""What each objective makes small."""


def _most(plan: Plan) -> str:
    """The devices that might have been used."""
    return _devices_text(plan.question.most_devices)


def _devices_text(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def reached_text(plan: Plan) -> str:
    """What the plan reaches of what was made small."""
    return _value_text(plan, plan.value.reached)


def _value_text(plan: Plan, value: float) -> str:
    """A number of what was made small, with its unit."""
    unit = "token" if plan.model.tokens_per_sample > 1 else "sample"
    match plan.question.objective.kind:
        case ObjectiveKind.THROUGHPUT:
            return f"{seconds_text(value)} per step"
        case ObjectiveKind.COST:
            return f"{value:.4g} per million {unit}s"
        case ObjectiveKind.ENERGY:
            return f"{value:.4g} J per {unit}"
        case ObjectiveKind.DEVICES:
            return _devices_text(round(value))


def certainty_text(plan: Plan) -> str:
    """Where measured steps of comparable runs lie against their predictions, or that none are known."""
    return str(plan.provenance.comparable or "no comparable runs are known")


def is_too_near(plan: Plan, step_time_s: float) -> bool:
    """Whether another step differs from the plan's by less than runs differ from their predictions."""
    runs = plan.provenance.comparable
    return runs is not None and abs(step_time_s / plan.step_time_s - 1) < runs.spread


TOO_NEAR = "nearer than runs are to predictions"
"""What is said of two steps whose order is not certain."""


def _unpriced(plan: Plan) -> str:
    """What the price of the precision leaves out, in a few words."""
    recipe = plan.question.precision
    return f"; {recipe.name} without casts and scales" if recipe.quantizes_products else ""


def _title(plan: Plan) -> str:
    cluster = plan.cluster
    return (
        f"{plan.model.name} ({plan.model.parameter_count:,} parameters, {plan.model.layers} layers) on "
        f"{cluster.device_count} x {cluster.accelerator.name}"
    )


def degrees_text(strategy: Parallelism) -> str:
    """The degrees that multiply to the devices, and over how many of these experts are divided and cut."""
    named = [("dp", strategy.dp), ("cp", strategy.cp), ("tp", strategy.tp), ("pp", strategy.pp)]
    degrees = " x ".join(f"{name} {degree}" for name, degree in named if name != "cp" or degree > 1)
    degrees += f", ep {strategy.ep}" if strategy.ep > 1 else ""
    return degrees if strategy.expert_tp is None else f"{degrees}, expert tp {strategy.expert_tp}"


def zero_text(strategy: Parallelism) -> str:
    """The ZeRO stage, and its groups where these are not all devices."""
    is_hybrid = strategy.zero and strategy.shard_groups > 1
    groups = f" over {strategy.shard_devices} of {strategy.replicas}" if is_hybrid else ""
    return f"ZeRO-{strategy.zero}{groups}"


def strategy_text(strategy: Parallelism) -> str:
    """One line: degrees first, then what they do."""
    modes = list(dict.fromkeys(strategy.recompute))
    recompute = (
        modes[0] if len(modes) == 1 else " and ".join(f"{mode} x{strategy.recompute.count(mode)}" for mode in modes)
    )
    words = [degrees_text(strategy), f"microbatch {strategy.micro_batch_size}"]
    if strategy.pp > 1:
        chunks = f" with {strategy.chunks} chunks" if strategy.chunks > 1 else ""
        words.append(f"schedule {strategy.schedule}{chunks}")
    words.append(zero_text(strategy))
    if strategy.tp > 1:
        words.append(_SEQUENCE_WORDS[strategy.sequence_parallel])
    words.append(f"recompute {recompute}")
    if strategy.offload is not Offload.NONE:
        words.append(f"{HOST_WORDS[strategy.offload]} on the host")
    return ", ".join(words)


_SEQUENCE_WORDS: dict[bool | str, str] = {
    True: "sequence parallel",
    False: "no sequence parallelism",
    MIXED_SEQUENCES: "sequences split in some layers",
}


def verdict(plan: Plan) -> str:
    """What is proven, in words."""
    bound = _bound_text(plan)
    of_what = "the best of this strategy" if plan.question.strategy else "the best"
    of_what = of_what.replace("best", _BEST_WORDS[plan.question.objective.kind])
    match plan.status:
        case PlanStatus.OPTIMAL:
            return f"optimal: {bound}"
        case PlanStatus.WITHIN_GAP:
            return f"within {percent_up(plan.gap)} of {of_what}: {bound}"
        case PlanStatus.ABOVE_GAP:
            asked = f"{plan.question.gap * 100:.4g} %"
            return f"ended at {percent_up(plan.gap)} of {of_what}, {asked} was asked: {bound}"
        case PlanStatus.INTERRUPTED:
            return f"interrupted: the best so far, within {percent_up(plan.gap)} of {of_what}: {bound}"
        case PlanStatus.DOES_NOT_FIT:
            if plan.question.strategy:
                return "DOES NOT FIT: priced as if it did"
            return "DOES NOT FIT: this is the plan that needs least memory; explain() lists what would fit"


def _bound_text(plan: Plan) -> str:
    """What no plan falls below, and over what that holds, as a sentence."""
    plans, kind, bound = _bounded_plans(plan), plan.question.objective.kind, plan.value.bound
    taken = f"{plans} on {_devices_text(plan.cluster.device_count)} takes less than {seconds_text(plan.bound_s)}"
    match kind:
        case ObjectiveKind.THROUGHPUT:
            return f"{plans} takes less than {seconds_text(plan.bound_s)}"
        case ObjectiveKind.COST:
            takes = f"costs less than {_value_text(plan, bound)}"
        case ObjectiveKind.ENERGY:
            takes = f"takes less than {_value_text(plan, bound)}"
        case ObjectiveKind.DEVICES:
            limit_s = plan.question.objective.step_time_s
            does = "fits" if limit_s is None else f"takes at most {seconds_text(limit_s)}"
            fewer = f"{plans} on fewer than {_value_text(plan, bound)} {does}"
            return f"{fewer}, each stage on tp of them, and {taken}" if bound > 1 else taken
    return f"{plans} on 1 to {_most(plan)}, each stage on tp of them, {takes}"


def _bounded_plans(plan: Plan) -> str:
    """What the bound holds over, as the subject of a sentence."""
    strategy = plan.question.strategy
    if not strategy:
        return "no plan of any slicing offered"
    names = [name for name in _FILLED_IN if name != "sequence_parallel" or strategy.get("tp") != 1]
    is_open = any(strategy.get(name) is None for name in names)
    is_open |= len(plan.question.cp) > 1 or len(plan.question.ep) > 1
    if strategy.get("stages") is not None and is_open:
        return "no way that was tried to fill in what this strategy leaves open"
    return "no plan of this strategy"


_BEST_WORDS = {
    ObjectiveKind.THROUGHPUT: "best",
    ObjectiveKind.COST: "cheapest",
    ObjectiveKind.ENERGY: "least energy",
    ObjectiveKind.DEVICES: "fewest devices and the fastest on them",
}
"""What a plan is compared with, by objective."""

_FILLED_IN = ("dp", "tp", "zero", "micro_batch_size", "sequence_parallel", "recompute")
"""What is tried, and not optimised in every way, where a strategy gives its stages and leaves these out."""


def percent_up(share: float) -> str:
    """A percentage that is never rounded down; what lies above it by the rounding of sums alone does not raise it."""
    return f"{math.ceil((share - EQUAL_RESULTS) * 1e4) / 1e2:.2f} %"


def seconds_text(seconds: float) -> str:
    """Four digits and a unit."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us" if seconds else "0 s"


def _stage_table(stages: Sequence[Stage]) -> list[str]:
    shown = list(enumerate(stages))
    left_out = len(shown) - MOST_STAGES
    if left_out > 0:
        shown = [*shown[: MOST_STAGES // 2], *shown[-MOST_STAGES // 2 :]]
    rows = [_stage_row(index, stage) for index, stage in shown]
    lines = _columns([_HEADINGS, *rows])
    if left_out > 0:
        lines.insert(1 + MOST_STAGES // 2, f"  ... {left_out} more stages ...")
    return lines


def _stage_row(index: int, stage: Stage) -> tuple[str, ...]:
    memory = stage.memory_bytes
    largest = max((item for item in memory if item not in BESIDE_ITEMS), key=lambda item: memory[item])
    return (
        str(index),
        _layer_range(stage.layers),
        f"{stage.devices[0]}-{stage.devices[-1]}" if len(stage.devices) > 1 else str(stage.devices[0]),
        stage.recompute,
        seconds_text(stage.forward_s),
        seconds_text(stage.backward_s),
        f"{memory['total'] / 2**30:.1f} of {memory['capacity'] / 2**30:.0f} GiB",
        f"{largest} {memory[largest] / 2**30:.1f}",
        stage.fit,
    )


def _layer_range(layers: Sequence[StageLayer]) -> str:
    if len(layers) == 1:
        return _shortened(f"{layers[0].index}:{layers[0].path}")
    return f"{layers[0].index}-{layers[-1].index}"


def _shortened(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:13]}..."


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _paragraph(label: str, text: str) -> list[str]:
    return _wrapped(text, label, " " * len(label)) or [label]


def _bullets(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in _wrapped(text, "  - ", "    ")]


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Lines of at most 100 columns; a number stays with its unit, and words with hyphens stay whole."""
    joined = re.sub(r"(?<=\d) (?=(s|ms|us|GiB|%)\b|%)", "\u00a0", text)
    lines = textwrap.wrap(joined, COLUMNS, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def explanation(plan: Plan) -> str:
    """What binds, what other kinds would cost, what other hardware would bring, and what would make it fit."""
    plan = with_printable_text(plan)
    lines = [*_paragraph("", f"{plan.model.name}: {strategy_text(plan.strategy)}, {verdict(plan)}."), ""]
    sections = (
        ("what binds", plan.binds),
        ("would fit", [f"{remedy.text}: optimize(..., {remedy.argument}={remedy.value})" for remedy in plan.remedies]),
        ("the best of other kinds that were seen", [_runner_up_text(plan, other) for other in plan.runners_up]),
        ("other hardware", [_change_text(plan, change.text, change.step_time_s) for change in plan.changes]),
        ("what layers keep for backward within their budgets", _kept_texts(plan)),
        ("how the numbers were obtained", provenance_lines(plan)),
    )
    for heading, texts in sections:
        if texts:
            lines += [f"{heading}:", *_bullets(texts), ""]
    return "\n".join(lines).rstrip()


def _kept_texts(plan: Plan) -> list[str]:
    """The tensors that layers keep which recompute within a budget."""
    return [
        f"{kind.name} ({kind.recompute}): {', '.join(kind.kept)}"
        for kind in plan.layer_kinds
        if kind.recompute in BUDGET_MODES
    ]


def _runner_up_text(plan: Plan, runner_up: RunnerUp) -> str:
    if runner_up.step_time_s is None or runner_up.strategy is None:
        return f"{runner_up.kind}: {runner_up.reason}"
    slower = runner_up.step_time_s / plan.step_time_s - 1
    reason = f"; {runner_up.reason}" if runner_up.reason else ""
    reason += "; faster, but within the gap at which the search ended" if slower < 0 else ""
    reason += f"; {TOO_NEAR}" if is_too_near(plan, runner_up.step_time_s) else ""
    time_text = f"{seconds_text(runner_up.step_time_s)} ({slower:+.2%})"
    return f"{runner_up.kind}: {time_text}: {strategy_text(runner_up.strategy)}{reason}"


def _change_text(plan: Plan, text: str, step_time_s: float | None) -> str:
    if step_time_s is None:
        return f"{text}: still nothing fits"
    if not plan.is_feasible:
        return f"{text}: {seconds_text(step_time_s)} per step"
    faster = plan.step_time_s / step_time_s - 1
    return f"{text}: {seconds_text(step_time_s)} per step ({faster:+.1%} throughput)"


def provenance_lines(plan: Plan) -> list[str]:
    """How the numbers were obtained, a line for each fact."""
    facts = plan.provenance
    lines = [
        f"prices: {facts.prices}" + (" (nothing is fitted to measurements)" if facts.prices == "ideal" else ""),
        f"certainty: {certainty_text(plan)}",
        f"{facts.schedules_proven} of {facts.schedules} scheduled passes of layers are proven within 1 %",
        f"the bound holds over {_offered(plan)}",
        f"rules cover {facts.coverage_flops:.1%} of flops and {facts.coverage_bytes:.1%} of bytes",
        f"target: {facts.target}",
    ]
    if facts.unrestricted_step_time_s is not None:
        costs = plan.step_time_s / facts.unrestricted_step_time_s - 1
        lines.append(
            f"what the target cannot run costs {costs:.2%}: without its limits a step takes "
            f"{seconds_text(facts.unrestricted_step_time_s)}"
        )
    if not plan.is_explained:
        lines.append("what other kinds of plans or other hardware would cost was not looked for")
    return [*lines, *facts.notes]


def _offered(plan: Plan) -> str:
    """What the plan was chosen from, in words."""
    sizes, degrees = (", ".join(map(str, values)) for values in (plan.question.micro_batch_size, plan.question.tp))
    what = "what the strategy leaves open of " if plan.question.strategy else ""
    further = ""
    for name, values in (("cp", plan.question.cp), ("ep", plan.question.ep)):
        further += f", {name} {', '.join(map(str, values))}" if values != (1,) else ""
    groups = " and ZeRO over groups of a power of two or of a level of the network," if _has_groups(plan) else ""
    return (
        f"{what}microbatch {sizes} and tp {degrees}{further},{groups} with sequences split between all layers, in "
        "none, or wherever that is fastest, at these prices"
    )


def _has_groups(plan: Plan) -> bool:
    """Whether ZeRO could shard over groups of devices, and the user did not say over which."""
    return plan.question.has_shard_groups and "shard" not in plan.question.strategy


def csv_text(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The text of a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if value is None else value for value in row])
    return text.getvalue()
