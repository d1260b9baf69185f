"""Find the accelerator to build for three models at once, with proof that no other design of a space is better.

On this machine:  python examples/design_accelerator.py
The paper's size: python examples/design_accelerator.py --devices 1024 --batch 4096 --whole-space --journal search.jsonl

The answer is the design with the best average of the models' throughputs, each relative to the same model on the
baseline `tpuv4-paper`. With a journal, a search that is interrupted goes on where it was.
"""

import argparse

import phaze


def main() -> None:
    """Search, and tell the design with each model's throughput on it."""
    arguments = read_arguments()
    if arguments.whole_space:  # 29,360 designs with three memories each, on all cores of this machine
        choices = {"space": "paper", "executor": "processes"}
    else:  # few enough for a laptop; every axis may have as many values as you like
        space = phaze.space.grid(
            tensor_cores=[2, 4, 8],
            tensor_rows=[64, 128],
            tensor_cols=[64, 128],
            vector_cores=[2, 4],
            buffer_mib=[32, 64],
            max_area_mm2=300,
        )
        choices = {"space": space, "hbm_gib": (16, 32), "micro_batch_size": (1, 4), "tp": 1, "executor": "serial"}
    result = phaze.search(
        arguments.models,
        devices=arguments.devices,
        global_batch_size=arguments.batch,
        journal=arguments.journal,
        **choices,
    )
    print(result)
    for model in result.best.models:
        print(f"{model.model}: {model.ratio:.2f} times the samples per second of tpuv4-paper")
    if arguments.out:
        result.save(arguments.out)  # `phaze report FILE` draws it


def read_arguments() -> argparse.Namespace:
    """The models and the size of the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["bert-base", "gpt2", "opt-350m"], metavar="MODEL")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--whole-space", action="store_true", help="the paper's space instead of a small one")
    parser.add_argument("--journal", metavar="FILE", help="keep what was done there, and go on from it")
    parser.add_argument("--out", metavar="FILE", help="save the answer as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
