"""Every kind of file that Phaze reads: good examples of it, and what a user does with one.

`use` reads a file as a user would, and shows or passes on what was read, so that damage which only breaks a later step
is found too. Whatever is wrong with a file must be a PhazeError.
"""

import gzip
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from designs import SMALL, some_points, tiny_model
from graphs import TINY_CONFIGS
from plans import QUESTION, small_cluster, small_graph

import phaze
from phaze.calibration_fitting import read_steps, read_trace
from phaze.cost import Calibration, load_calibration, save_calibration
from phaze.explore.journal import Journal, read_header
from phaze.explore.saved_search import read_search, result_of_journal
from phaze.explore.search_question import question_from_header
from phaze.hardware import find_accelerator, parse_cluster
from phaze.hardware.hardware_files import load_accelerator, load_cluster, save_accelerator, save_cluster
from phaze.installed import installed_plugins
from phaze.model_import import import_with_plugins
from phaze.plan.plan import read_plan
from phaze.strategy_files import find_source

__all__ = ["FORMATS", "Format", "named_format", "plan_text"]


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file: its name, the ending of its files, good examples, and what a user does with a file.

    `weight` says how often it is drawn, beside the others: formats that people pass on most are tried most.
    """

    name: str
    suffix: str
    examples: Callable[[], tuple[bytes, ...]]
    use: Callable[[Path], object]
    weight: int = 4


@cache
def plan_text(strategy: tuple[tuple[str, object], ...] = (("dp", 4), ("pp", 2), ("schedule", "1f1b"))) -> str:
    """A plan of the small GPT with a strategy."""
    options: dict[str, Any] = {**QUESTION, "micro_batch_size": (1,)}
    asked = dict(strategy)
    return phaze.evaluate(
        small_graph(), cluster=small_cluster(), strategy=asked, compares=False, **options
    ).plan.to_json()


@cache
def _plans() -> tuple[bytes, ...]:
    return (plan_text().encode(), plan_text((("dp", 8), ("zero", 2))).encode())


def _use_plan(path: Path) -> None:
    plan = read_plan(path)
    str(plan)
    plan.to_json()
    plan.timeline()


@cache
def _searches() -> tuple[bytes, ...]:
    return (phaze.search(tiny_model(), space=some_points(3), executor="serial", **SMALL).to_json().encode(),)


def _use_search(path: Path) -> None:
    result = read_search(path)
    str(result)
    result.to_json()


@cache
def _journals() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        phaze.search(tiny_model(), space=some_points(3), executor="serial", journal=path, **SMALL)
        return (path.read_bytes(),)


_plugins = cache(installed_plugins)

_RESUMED_SHARE = 40


def _use_journal(path: Path) -> None:
    header = read_header(path)
    copied = path.with_suffix(".resumed")
    shutil.copyfile(path, copied)
    journal = Journal.open(copied, header)
    journal.add("fuzz", 1.0, {"value": 1.0})
    journal.close()
    question_from_header(header, tiny_model(), None, plugins=_plugins())
    # A search from a journal takes longer than all that comes before: one in so many is tried, by its content.
    if zlib.crc32(path.read_bytes()) % _RESUMED_SHARE == 0:
        result_of_journal(path, [tiny_model()], plugins=_plugins())


def _saved(save: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.json"
        save(path)
        return path.read_bytes()


@cache
def _graphs() -> tuple[bytes, ...]:
    return (_saved(tiny_model().save),)


@cache
def _clusters() -> tuple[bytes, ...]:
    torus = parse_cluster("tpuv4:64")
    return (_saved(lambda path: save_cluster(small_cluster(), path)), _saved(lambda path: save_cluster(torus, path)))


@cache
def _accelerators() -> tuple[bytes, ...]:
    return (_saved(lambda path: save_accelerator(find_accelerator("h100"), path)),)


@cache
def _calibrations() -> tuple[bytes, ...]:
    fitted = Calibration(name="mine", matrix=0.6, memory=0.8, overhead_s=4e-6)
    return (_saved(lambda path: save_calibration(path, fitted, report={"runs": 3})),)


_SPACE = {
    "format": "phaze-space",
    "version": 1,
    "tensor_cores": [1, 2],
    "tensor_rows": 128,
    "tensor_cols": [64, 128],
    "vector_cores": {"from": 1, "to": 4, "times": 2},
    "buffer_mib": [16, 32],
    "max_area_mm2": 300,
}

_STEPS = (
    "model,cluster,global_batch,seconds,dp,tp,pp,zero,schedule,sequence_parallel,memory_gib\n"
    "gpt2,a100-80gb:8,64,0.5,8,1,1,1,none,false,30\n"
    "gpt2-xl,a100-80gb:8,64,1.5,2,4,1,0,none,true,60\n"
)


def _trace() -> bytes:
    events: list[dict[str, object]] = [
        {"ph": "X", "name": "ProfilerStep#1", "ts": 0, "dur": 900, "cat": "user_annotation", "tid": 1},
        {"ph": "X", "name": "ampere_bf16_gemm", "ts": 0.5, "dur": 400, "cat": "kernel", "tid": 1},
        {"ph": "X", "name": "vectorized_elementwise", "ts": 401, "dur": 200.25, "cat": "kernel", "tid": 1},
        {"ph": "X", "name": "aten::mm", "ts": 0, "dur": 5, "cat": "cpu_op", "tid": 1},
        {"ph": "M", "name": "process_name", "pid": 1},
    ]
    return json.dumps({"traceEvents": events, "schemaVersion": 1}).encode()


@cache
def _configs() -> tuple[bytes, ...]:
    families = ("gpt2", "llama", "mixtral", "deepseek_v3", "gemma2", "mamba2", "t5", "bert")
    return tuple(json.dumps(TINY_CONFIGS[family]).encode() for family in families)


def _use_config(path: Path) -> None:
    import_with_plugins(_plugins(), path, None, frontend=None, options={"sequence_length": 4})


_MEGATRON = b"torchrun pretrain.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64\n"
_TITAN = b'[training]\nlocal_batch_size = 2\n[parallelism]\ntensor_parallel_degree = 2\n[model]\nname = "llama3"\n'
_DEEPSPEED = b'{"train_batch_size": 256, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
_ACCELERATE = b"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"


def _strategy(name: str, suffix: str, text: bytes) -> Format:
    return Format(name, suffix, lambda: (text,), lambda path: find_source(path, _plugins()).read(64), 1)


FORMATS: tuple[Format, ...] = (
    Format("plan", ".json", _plans, _use_plan, 12),
    Format("search", ".json", _searches, _use_search),
    Format("journal", ".jsonl", _journals, _use_journal, 8),
    Format("graph", ".json", _graphs, phaze.load_graph),
    Format("cluster", ".json", _clusters, load_cluster),
    Format("accelerator", ".json", _accelerators, load_accelerator, 2),
    Format("calibration", ".json", _calibrations, load_calibration),
    Format("space", ".json", lambda: (json.dumps(_SPACE).encode(),), phaze.space.load),
    Format("measured runs", ".csv", lambda: (_STEPS.encode(),), read_steps),
    Format("trace", ".json", lambda: (_trace(),), read_trace),
    Format("gzipped trace", ".json.gz", lambda: (gzip.compress(_trace(), mtime=0),), read_trace),
    Format("config", ".json", _configs, _use_config, 6),
    _strategy("megatron arguments", ".sh", _MEGATRON),
    _strategy("torchtitan job", ".toml", _TITAN),
    _strategy("deepspeed config", ".json", _DEEPSPEED),
    _strategy("accelerate config", ".yaml", _ACCELERATE),
)


def named_format(name: str) -> Format:
    """The format of a name, whatever its weight."""
    return replace(next(kind for kind in FORMATS if kind.name == name), weight=1)
