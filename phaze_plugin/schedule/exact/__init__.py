"""The exact method: a dynamic program over sets of started jobs, bounded from below and above, many at a time.

Level k holds partial schedules with k started jobs. Jobs are appended in the order of their starts, links among them; a
job starts as soon as its predecessors, its cores or the link, and the start before it allow, on one core or spread. Any
schedule, taken in the order of its starts, is reached with no job later. Let V be the least makespan that a partial
schedule can be completed to. From a level the next one is made for all partial schedules at once, and a partial
schedule is dropped when

 1. another job could end before its new job starts (Giffler and Thompson, 1960): `possible_extensions`. In every
    completion that other job starts later, as all do; put where it could have been, it disturbs none and is the first
    of them to start. So V is no larger where it is appended instead, and of these jobs the one that ends first is not
    dropped itself.
 2. its new job is spread, exclusive and without successors, while jobs with successors wait and no job is off the
    cores: `_spread_extensions`. Nothing overlaps the new job: cut it out, shift all that follows to the left, and run
    it last.
 3. its lower bound reaches the target, incumbent x (1 - gap): `extend_schedules`. The bounds are the weights of the
    bounds module with the part of running jobs still to come (`_quick_bound`, `_weight_bound`); the ways to the end
    (`_path_bound`); and, while one-core jobs hold cores until time F, no job is spread before F: jobs that one-core
    latencies cannot bring in before F do all their work after it (`_block_bound`).
 4. another partial schedule has started the same jobs and is nowhere later, in clocks, cores, and ends that successors
    wait for: `undominated`. What completes the one completes the other, no later.
 5. the level is wider than allowed: `_run_pass`. The least bound of what is dropped for this reason stays as the proven
    bound.
 6. its new job is not the one that holds neither cores nor link and could start: `_eligible`. When that one starts is
    settled, and it delays nothing: it is appended first.
 7. its new job overtakes one that is alike, has no other predecessors and as many successors or more: `_leaders` and
    `_eligible`. The two can change places in any schedule.

Rules 1 and 4 leave, of the partial schedules of a level with the least V, at least one. Rules 2 and 7 narrow the
schedules looked for, by what has started alone. The best schedule left is as short: any best schedule can be brought
into the narrowed form by letting jobs with successors change places, then running jobs without successors last, then
letting these change places, and no step undoes an earlier one. To order jobs that start together would halve the work,
but the partial schedule that it relies on may itself have been dropped by rule 4.

If nothing is dropped by rule 5, the better of what is found and the target is proven. Wider and wider passes give
better incumbents first and the proof last; the same input gives the same passes.
"""

from phaze.schedule.exact.widening_passes import SearchOutcome, search_exact

__all__ = ["SearchOutcome", "search_exact"]
