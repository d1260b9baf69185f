"""Training loops as people write them, run by ranks and by one process: what `torch_ranks.py` runs for loop cases.

A history has batches of other sizes and lengths, padded ones, and one whose loss is divided by a number that is given.
Parameters are in two groups by name, their learning rates follow a schedule, gradients of two batches are added and
clipped, and the model is evaluated between steps.
"""

from typing import Any

import torch
from torch_training import batch_of, build_model

import phaze

IGNORED = -100


def padded_batch(seed: int, size: int = 8) -> dict[str, torch.Tensor]:
    """Sequences of different lengths, whose padding counts nothing; the last two count nothing at all."""
    batch = batch_of("llama", seed=seed, size=size)
    ids, labels, mask = batch["input_ids"], batch["labels"], torch.ones_like(batch["input_ids"])
    for place, length in enumerate([16, 3, 9, 2, 12, 5, 7, 4][:size]):
        labels[place, length:], mask[place, length:], ids[place, length:] = IGNORED, 0, 2
    labels[-2:] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def history() -> list[list[dict[str, Any]]]:
    """Batches by step; gradients of those of one step are added."""

    def cut(seed: int, samples: int, length: int) -> dict[str, Any]:
        return {name: value[:samples, :length] for name, value in batch_of("llama", seed=seed, size=12).items()}

    given = padded_batch(2)
    items = (given["labels"][:, 1:] != IGNORED).sum()
    return [
        [padded_batch(1)],
        [{**given, "num_items_in_batch": items}],
        [cut(3, 5, 16)],
        [cut(4, 8, 12), cut(5, 3, 8)],
        [cut(6, 1, 16)],
        [cut(7, 12, 16)],
    ]


def grouped(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """An optimizer of the plain model with two groups of parameters, and a schedule of its learning rates."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [
        {"params": [value for value in trained.values() if value.dim() >= 2], "weight_decay": 0.1, "lr": 0.2},
        {"params": [value for value in trained.values() if value.dim() < 2], "weight_decay": 0.0, "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train_alone(kind: str) -> tuple[torch.nn.Module, list[float]]:
    """The model and all losses of one process."""
    model, losses = build_model(kind), []
    optimizer, scheduler = grouped(model)
    for batches in history():
        optimizer.zero_grad()
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            losses.append(float(model(**padded_batch(8, size=7)).loss))
    return model, losses


def train_applied(kind: str, plan: phaze.Plan) -> tuple[Any, list[float]]:
    """The run and all losses of a plan."""
    model, losses = build_model(kind), []
    optimizer, scheduler = grouped(model)
    run = plan.apply(model, optimizer=optimizer)  # stages are cut with the inputs that the model describes
    assert run.optimizer is optimizer
    for batches in history():
        optimizer.zero_grad()
        losses += [float(run.backward(**run.share(batch))) for batch in batches]
        run.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        losses.append(float(run.evaluate(**run.share(padded_batch(8, size=7)))))
    return run, losses


def dropped(plan: phaze.Plan, seed: int) -> tuple[float, bool]:
    """What a nanoGPT with dropout makes of equal samples on a process of this seed.

    Said is, too, whether the process's own random numbers are where they were.
    """
    model, kept = build_model("nanogpt"), []
    words, last = model.transformer["wte"], model.transformer["ln_f"]
    words.register_forward_hook(lambda _, __, output: torch.nn.functional.dropout(output, 0.5))
    last.register_forward_hook(lambda _, __, output: kept.append(float(output.detach().double().abs().sum())))
    torch.manual_seed(seed)
    run = plan.apply(model, inputs=batch_of("nanogpt"))
    before = torch.get_rng_state()
    run.step(**run.share({name: value[:1].expand(8, -1) for name, value in batch_of("nanogpt").items()}))
    return kept[0], bool(torch.equal(before, torch.get_rng_state()))
