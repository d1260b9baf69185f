"""The exact method: a dynamic program over sets of started ops, bounded from below and above, many states at a time.

Level k holds partial schedules with k started ops. Ops are appended in order of their starts, links among them; an op
starts as soon as its predecessors, its cores or the link, and the start before it allow, on one core or spread. Any
schedule, taken in the order of its starts, is reached with no op later. Let V be the least makespan that a state can be
completed to. From a level the next one is made for all states at once, and a state is dropped when

 1. another op could end before its new op starts (Giffler and Thompson, 1960). In every completion that other op starts
    later, as all do; put where it could have been, it disturbs none and is the first of them to start. So V is no
    larger where it is appended instead, and of these ops the one that ends first is not dropped itself.
 2. its new op is spread, exclusive and without successors, while ops with successors wait and no op is off the cores.
    Nothing overlaps the new op: cut it out, shift all that follows to the left, and run it last.
 3. its lower bound reaches the target, incumbent x (1 - gap). The bounds are the weights of the bounds module with the
    part of running ops still to come; the ways to the end; and, while one-core ops hold cores until time F, no op is
    spread before F: ops that one-core latencies cannot bring in before F do all their work after it.
 4. another state has started the same ops and is nowhere later: clocks, cores, ends that successors wait for. What
    completes the one completes the other, no later.
 5. the level is wider than allowed. The least bound of the states dropped for this reason stays as the proven bound.
 6. its new op is not the one that holds neither cores nor link and could start. When that one starts is settled, and it
    delays nothing: it is appended first.
 7. its new op overtakes one that is alike, has no other predecessors and as many successors or more. The two can change
    places in any schedule.

Rules 1 and 4 leave, of the states of a level with the least V, at least one. Rules 2 and 7 narrow the schedules looked
for, by what has started alone: change places with ops that have successors, run ops without successors last, change
places among these; no step of a kind undoes one of a kind before it, so that the best schedule left is as short. To
order ops that start together would halve the work, but the state it relies on may itself have been dropped by rule 4.

If nothing is dropped by rule 5, the better of what is found and the target is proven. Wider and wider passes give
better incumbents first and the proof last; the same input gives the same passes.
"""

from phaze.schedule.frontier.passes import Outcome, search_frontier

__all__ = ["Outcome", "search_frontier"]
