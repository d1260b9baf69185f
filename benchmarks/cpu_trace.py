"""Calibrates this machine's `cpu` from one profiled training step of a small GPT-2, then predicts other models on it.

    OMP_NUM_THREADS=1 python benchmarks/cpu_trace.py [--repeats N]

Single process, one thread, float32, every operator a kernel of its own. Measured is the least processor time of several
steps (forward, backward, AdamW); of several traced steps the one that took least of it is taken. Beside it the best
single constant (GFLOP/s), each model predicted from the others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

import phaze
from phaze.cli import main as phaze_command
from phaze.cost import Calibration, load_calibration


def gpt2(layers: int, hidden: int, heads: int, length: int, vocabulary: int = 4096) -> Any:
    """A GPT-2."""
    return GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length, vocab_size=vocabulary)


TRACED = (gpt2(4, 256, 4, 128), 4)
OTHERS = {
    "gpt2, 6 layers": (gpt2(6, 256, 4, 128), 4),
    "gpt2, twice as wide": (gpt2(3, 512, 8, 128), 4),
    "gpt2, longer": (gpt2(4, 256, 4, 384), 2),
    "llama": (
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=320,
            intermediate_size=896,
            num_attention_heads=5,
            num_key_value_heads=5,
            vocab_size=4096,
            max_position_embeddings=128,
        ),
        4,
    ),
    "opt": (
        OPTConfig(
            num_hidden_layers=3,
            hidden_size=384,
            ffn_dim=1536,
            num_attention_heads=6,
            vocab_size=8192,
            max_position_embeddings=128,
            word_embed_proj_dim=384,
        ),
        8,
    ),
}


def step_of(config: Any, batch: int) -> Any:
    """A function that trains one step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    length = getattr(config, "n_positions", None) or config.max_position_embeddings
    ids = torch.randint(0, config.vocab_size, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


def least_seconds(config: Any, batch: int, repeats: int) -> float:
    """The quickest of several steps."""
    step = step_of(config, batch)
    times = []
    for _ in range(repeats + 2):
        started = time.process_time()
        step()
        times.append(time.process_time() - started)
    return min(times[2:])


def record(path: Path, config: Any, batch: int, repeats: int) -> None:
    """Trace a step several times and keep the trace that took least processor time.

    A trace holds wall-clock times. Where other processes had the processor in between, all of them are scaled by the
    share of the step in which this one ran, as the steps that are predicted are measured in processor time too.
    """
    step, least_s = step_of(config, batch), math.inf
    step()
    for _ in range(repeats):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            wall_s, own_s = time.perf_counter(), time.process_time()
            step()
            wall_s, own_s = time.perf_counter() - wall_s, time.process_time() - own_s
        if own_s < least_s:
            least_s, share = own_s, min(1.0, own_s / wall_s)
            profiler.export_chrome_trace(str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    for event in document["traceEvents"]:
        for key in ("ts", "dur"):
            if isinstance(event.get(key), int | float):
                event[key] *= share
    path.write_text(json.dumps(document), encoding="utf-8")
    print(f"traced step: {least_s:.4f} s of processor time, {share:.0%} of its wall-clock time")


def predicted(config: Any, batch: int, calibration: Calibration) -> tuple[float, float]:
    """Seconds and flops of one step."""
    graph = phaze.import_graph(config)
    plan = phaze.evaluate(
        graph,
        strategy={
            "dp": 1,
            "tp": 1,
            "pp": 1,
            "micro_batch_size": batch,
            "schedule": "none",
            "chunks": 1,
            "zero": 0,
            "recompute": "none",
            "stages": (len(graph.layers),),
        },
        cluster="cpu:1",
        global_batch_size=batch,
        precision="fp32",
        target=None,
        compares=False,
        calibration=calibration,
    ).plan
    return plan.step_time_s, plan.model.matmul_flops_per_sample * batch


def main() -> None:
    """Trace, calibrate, predict, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trace, config, out = (Path(folder) / name for name in ("trace.json", "config.json", "cpu.json"))
        record(trace, *TRACED, repeats)
        config.write_text(TRACED[0].to_json_string(use_diff=False), encoding="utf-8")
        command = ["calibrate", "--trace", str(trace), "--model", str(config), "--cluster", "cpu:1"]
        phaze_command([*command, "--global-batch", str(TRACED[1]), "--precision", "fp32", "--out", str(out)])
        calibration = load_calibration(out)
    rows = []
    for name, (other, batch) in {"the traced one": TRACED, **OTHERS}.items():
        seconds, flops = predicted(other, batch, calibration)
        rows.append((name, least_seconds(other, batch, repeats), seconds, flops))
        print(f"{name:22} measured {rows[-1][1]:.4f} s, predicted {seconds:.4f} s, {seconds / rows[-1][1] - 1:+.1%}")
    others = rows[1:]
    print(f"MAPE {statistics.mean(abs(row[2] / row[1] - 1) for row in others):.1%} on {len(others)} others; ", end="")
    ranks = [sorted(range(len(others)), key=lambda index: others[index][side]) for side in (1, 2)]
    places = [[float(rank.index(index)) for index in range(len(others))] for rank in ranks]
    print(f"Spearman {statistics.correlation(*places):.2f}")
    errors = []
    for index, row in enumerate(others):
        rates = [other[3] / other[1] for at, other in enumerate(others) if at != index]
        errors.append(abs(row[3] / statistics.median(rates) / row[1] - 1))
    print(f"best constant, each from the others: MAPE {statistics.mean(errors):.1%}")


if __name__ == "__main__":
    main()
