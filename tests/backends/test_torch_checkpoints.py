"""Training saved under one plan and resumed under another goes on as one process does; whole models are read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from repository import ROOT
from torch_plans import planned
from torch_training import batch_of, build_model, loss_of

from phaze.backends.torch.checkpoints import TrainingState, load_checkpoint
from phaze.errors import PlanError

SCRIPT = ROOT / "tests" / "support" / "torch_checkpoint_ranks.py"
KIND, FIRST, LATER = "gpt2", (1, 2), (3, 4)
RATE = 1e-2


def of_one_process(kind: str) -> tuple[list[float], torch.nn.Module]:
    """The losses of all steps, and the model that has trained the first ones."""
    model = build_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, saved = [], {}
    for seed in FIRST + LATER:
        optimizer.zero_grad()
        loss = loss_of(kind, model, batch_of(kind, seed=seed))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if seed == FIRST[-1]:
            saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    return losses, model


def stage(folder: Path, kind: str, world: int, strategy: dict[str, object], **what: Any) -> dict[str, Any]:
    """One part of a training history."""
    path = folder / f"{len(list(folder.glob('*.plan')))}.plan"
    planned(kind, world, strategy).save(path)
    settled = {"resumes": "", "saves": "", "writes": "", "weights": "", "seeds": (), "learning_rate": RATE} | what
    return {"kind": kind, "plan": str(path), "world": world, **settled}


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two steps on dp2 x tp2, saved; then the next two on a pipeline and on one process; a whole model, which a model
    without storage then takes its weights from."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saved, whole = str(folder / "saved"), str(folder / "whole")
    forgotten = {"learning_rate": 0.5}  # the checkpoint knows better
    cases = [
        stage(folder, KIND, 4, {"dp": 2, "tp": 2, "zero": 3}, seeds=FIRST, saves=saved),
        stage(folder, KIND, 2, {"pp": 2}, resumes=saved, seeds=LATER, **forgotten),
        stage(folder, KIND, 1, {}, resumes=saved, seeds=LATER, **forgotten),
        stage(folder, KIND, 2, {"pp": 2}, resumes=saved, writes=whole),
        stage(folder, KIND, 2, {"dp": 2, "zero": 3}, weights=whole, seeds=LATER[:1]),
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [json.loads((folder / f"losses{index}.json").read_text()) for index in range(len(cases))]


def test_training_resumed_on_other_plans_goes_on_as_one_process_does(
    history: tuple[Path, list[dict[str, Any]]],
) -> None:
    expected, _ = of_one_process(KIND)
    first, on_pipeline, alone, *_ = history[1]
    assert first["losses"] == pytest.approx(expected[:2], rel=1e-5)
    assert on_pipeline["losses"] == pytest.approx(expected[2:], rel=1e-5)
    assert alone["losses"] == pytest.approx(expected[2:], rel=1e-5)
    assert on_pipeline["rates"] == alone["rates"] == [RATE]


def test_a_whole_model_is_read_by_hugging_face(history: tuple[Path, list[dict[str, Any]]]) -> None:
    read = transformers.AutoModelForCausalLM.from_pretrained(history[0] / "whole")
    losses, _ = of_one_process(KIND)
    loss = loss_of(KIND, read, batch_of(KIND, seed=LATER[0]))
    assert float(loss.detach()) == pytest.approx(losses[2], rel=1e-5)
    plain = build_model(KIND)  # in this process, without any process group
    state = TrainingState([plain], torch.optim.AdamW(plain.parameters(), lr=0.5), {})
    load_checkpoint(state, history[0] / "saved")
    names = dict(read.named_parameters())
    assert names.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(names[name], parameter) for name, parameter in plain.named_parameters())
    assert state.optimizer.param_groups[0]["lr"] == RATE
    assert all("exp_avg" in state.optimizer.state[parameter] for parameter in plain.parameters())


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(PlanError, match="is no checkpoint that can be read"):
        load_checkpoint(TrainingState([plain], torch.optim.SGD(plain.parameters()), {}), tmp_path)


def test_a_model_without_storage_takes_weights_from_files_into_shards(
    history: tuple[Path, list[dict[str, Any]]],
) -> None:
    expected, model = of_one_process(KIND)
    answer = history[1][-1]
    assert answer["losses"] == pytest.approx(expected[2:3], rel=1e-5)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert answer["held"] == pytest.approx(whole / 2, rel=0.02)
