"""Scheduling problems for tests: random ones, and a transformer layer's backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from phaze.schedule import Job, Resource, SchedulingProblem

RESOURCES = (Resource.TENSOR, Resource.VECTOR, Resource.BOTH, Resource.NONE, Resource.LINK)


def random_problem(seed: int, jobs: int, *, exclusive: bool | None = None, decimals: int = 3) -> SchedulingProblem:
    """A problem with all kinds of jobs, few cores and latencies that leave spreading an open question."""
    random = np.random.default_rng(seed)
    tensor_cores, vector_cores = (int(count) for count in random.integers(1, 4, 2))
    chosen = random.choice(len(RESOURCES), jobs, p=(0.35, 0.3, 0.15, 0.1, 0.1))
    made = []
    for number, resource in enumerate(RESOURCES[int(choice)] for choice in chosen):
        latency = (
            0.0
            if resource is Resource.NONE and random.random() < 0.7
            else round(float(random.uniform(1, 30)), decimals)
        )
        cores = {Resource.TENSOR: tensor_cores, Resource.VECTOR: vector_cores}.get(
            resource, min(tensor_cores, vector_cores)
        )
        spread = round(latency / cores * float(random.uniform(1.0, 1.6)), decimals) if latency else 0.0
        made.append(Job(f"job{number}", resource, latency, min(spread, latency)))
    density = float(random.uniform(0.1, 0.5))
    edges = [(i, j) for i in range(jobs) for j in range(i + 1, jobs) if random.random() < density]
    return SchedulingProblem(
        jobs=tuple(made),
        edges=tuple(edges),
        tensor_cores=tensor_cores,
        vector_cores=vector_cores,
        intra_op_exclusive=bool(random.random() < 0.6) if exclusive is None else exclusive,
        name=f"random-{seed}",
    )


def layer_like_problem(seed: int, jobs: int) -> SchedulingProblem:
    """A chain with jobs hanging off it, tensor and vector mixed, some alike: a backward pass; odd seeds have links."""
    random = np.random.default_rng(seed)
    tensor_cores, vector_cores = int(random.choice([1, 2, 4, 8])), int(random.choice([1, 2, 4]))
    latencies = [round(float(value), 3) for value in random.uniform(1, 40, 3)]
    made, edges, last = [], [], -1
    for number in range(jobs):
        resource = Resource.TENSOR if random.random() < 0.55 else Resource.VECTOR
        if seed % 2 and random.random() < 0.2:
            resource = Resource.LINK
        cores = tensor_cores if resource is Resource.TENSOR else vector_cores
        latency = latencies[int(random.integers(3))] / (1 if resource is Resource.TENSOR else 3)
        spread = latency / cores * float(random.choice([1.0, 1.25, cores]))
        made.append(Job(f"job{number}", resource, round(latency, 3), round(spread, 3)))
        before = last if random.random() < 0.8 else int(random.integers(-1, number))
        if before >= 0:
            edges.append((before, number))
        if random.random() < 0.55:
            last = number
    return SchedulingProblem(
        jobs=tuple(made),
        edges=tuple(edges),
        tensor_cores=tensor_cores,
        vector_cores=vector_cores,
        intra_op_exclusive=bool(random.random() < 0.85),
        name=f"layer-like-{seed}",
    )


def linked_problem(seed: int, jobs: int) -> SchedulingProblem:
    """Many links, in chains and side by side; every other seed has small whole latencies, some 0, so that ends meet."""
    random = np.random.default_rng(seed)
    tensor_cores, vector_cores = (int(count) for count in random.integers(1, 4, 2))
    share = float(random.uniform(0.2, 0.6))
    others = (1.0 - share) * np.array((0.4, 0.35, 0.15, 0.1))
    made = []
    for number, choice in enumerate(random.choice(len(RESOURCES), jobs, p=(*others, share))):
        resource = RESOURCES[int(choice)]
        latency = float(random.integers(0, 7)) if seed % 2 else round(float(random.uniform(1, 30)), 3)
        cores = {Resource.TENSOR: tensor_cores, Resource.VECTOR: vector_cores}.get(
            resource, min(tensor_cores, vector_cores)
        )
        spread = latency / cores * float(random.choice([1.0, 1.2, 1.5]))
        spread = math.ceil(2 * spread) / 2 if seed % 2 else round(spread, 3)
        made.append(Job(f"job{number}", resource, latency, min(spread, latency)))
    chains, density = int(random.integers(1, 4)), float(random.choice([0.0, 0.1, 0.4]))
    of_chain = random.integers(0, chains + 1, jobs)  # the last one is no chain
    edges = [
        (i, j)
        for j in range(jobs)
        for i in range(j)
        if of_chain[i] == of_chain[j] < chains or random.random() < density
    ]
    return SchedulingProblem(
        jobs=tuple(made),
        edges=tuple(edges),
        tensor_cores=tensor_cores,
        vector_cores=vector_cores,
        intra_op_exclusive=bool(random.random() < 0.6),
        name=f"linked-{seed}",
    )


def brute_force(problem: SchedulingProblem) -> float:
    """The optimum by trying every order, mode and core; jobs are appended, each as early as it can."""
    return _Search(problem).best


class _Search:
    """Depth first over all orders; written without anything from the package but the problem."""

    def __init__(self, problem: SchedulingProblem) -> None:
        self.problem, self.best = problem, math.inf
        self.before: list[set[int]] = [set() for _ in problem.jobs]
        for first, second in problem.edges:
            self.before[second].add(first)
        self._extend({}, [0.0] * problem.tensor_cores, [0.0] * problem.vector_cores, 0.0)

    def _extend(self, ended: dict[int, float], tensor: list[float], vector: list[float], link: float) -> None:
        if max(ended.values(), default=0.0) >= self.best:
            return
        if len(ended) == len(self.problem.jobs):
            self.best = max(ended.values(), default=0.0)
            return
        for job in range(len(self.problem.jobs)):
            if job not in ended and self.before[job] <= set(ended):
                ready = max((ended[other] for other in self.before[job]), default=0.0)
                for end, *after in self._placements(job, ready, tensor, vector, link):
                    self._extend({**ended, job: end}, *after)

    def _placements(
        self, job: int, ready: float, tensor: list[float], vector: list[float], link: float
    ) -> Iterator[tuple[float, list[float], list[float], float]]:
        entry, exclusive = self.problem.jobs[job], self.problem.intra_op_exclusive
        if entry.resource is Resource.NONE or entry.shortest_s == 0.0:  # what takes no time overlaps nothing
            yield ready + entry.shortest_s, tensor, vector, link
            return
        if entry.resource is Resource.LINK:
            end = max(ready, link) + entry.latency_s
            yield end, tensor, vector, end
            return
        on_tensor, on_vector = entry.resource.uses_tensor, entry.resource.uses_vector
        all_tensor, all_vector = on_tensor or exclusive, on_vector or exclusive
        held = [*(tensor if all_tensor else []), *(vector if all_vector else [])]
        end = max([ready, *held]) + entry.spread_s
        yield end, [end] * len(tensor) if all_tensor else tensor, [end] * len(vector) if all_vector else vector, link
        tried = set()
        cores = range(min([len(tensor)] * on_tensor + [len(vector)] * on_vector))
        for core in cores:
            state = (tensor[core] if core < len(tensor) else None, vector[core] if core < len(vector) else None)
            if state in tried:
                continue
            tried.add(state)
            free = [*(tensor[core : core + 1] if on_tensor else []), *(vector[core : core + 1] if on_vector else [])]
            end = max([ready, *free]) + entry.latency_s
            new_tensor = [*tensor[:core], end, *tensor[core + 1 :]] if on_tensor else tensor
            new_vector = [*vector[:core], end, *vector[core + 1 :]] if on_vector else vector
            yield end, new_tensor, new_vector, link
