"""Published training runs, one reader for each table; every row is a question, or has the reason why it is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from published.bigscience import read_bigscience
from published.fsdp_tables import read_fms, read_llm_foundry, read_torchtitan
from published.headlines import read_headlines, read_jax_toolbox
from published.megatron_core import read_bridge, read_dgxc, read_megatron_lm_h100, read_moe_zoo, read_nemo
from published.megatron_papers import read_korthikanti, read_sc21, read_vtrain
from published.rows import Row
from published.tpu_tables import read_maxtext, read_tpu_recipes
from published.zero_tables import read_internevo, read_nanotron

__all__ = ["DATASETS", "READERS", "Row", "read_rows"]

READERS: dict[str, tuple[str, Callable[[Path], Iterator[Row]]]] = {
    "megatron_sc21_table1.csv": ("sc21", read_sc21),
    "korthikanti_table5.csv": ("korthikanti", read_korthikanti),
    "bigscience_a100_topology.csv": ("bigscience", read_bigscience),
    "vtrain_a100_measured.csv": ("vtrain", read_vtrain),
    "llm_foundry_mpt.csv": ("llm-foundry", read_llm_foundry),
    "internevo_7b_hybrid_zero.csv": ("internevo", read_internevo),
    "torchtitan_all.csv": ("torchtitan", read_torchtitan),
    "torchtitan.csv": ("torchtitan", read_torchtitan),
    "nanotron_best_h100.csv": ("nanotron", read_nanotron),
    "nvidia_dgxc_benchmarking.csv": ("dgxc", read_dgxc),
    "nemo_2024_h100_and_long_context.csv": ("nemo-2024", read_nemo),
    "megatron_bridge.csv": ("megatron-bridge", read_bridge),
    "megatron_moe_model_zoo.csv": ("moe-zoo", read_moe_zoo),
    "megatron_lm_h100.csv": ("megatron-lm-h100", read_megatron_lm_h100),
    "ibm_fms_fsdp.csv": ("fms-fsdp", read_fms),
    "nvidia_jax_toolbox.csv": ("jax-toolbox", read_jax_toolbox),
    "maxtext_v4_v5e_v5p_as_published.csv": ("maxtext", read_maxtext),
    "tpu_recipes_v5p_v6e_tpu7x.csv": ("tpu-recipes", read_tpu_recipes),
    "tpu_and_headline.csv": ("headlines", read_headlines),
}
"""File to the name of its dataset and its reader."""

DATASETS = tuple(dict.fromkeys(name for name, _ in READERS.values()))


def read_rows(folder: Path, datasets: Sequence[str] | None = None) -> list[Row]:
    """The rows of all tables that are there, in the order of `READERS`."""
    rows: list[Row] = []
    for file, (name, reader) in READERS.items():
        if (folder / file).is_file() and (not datasets or name in datasets):
            rows += reader(folder / file)
    return rows
