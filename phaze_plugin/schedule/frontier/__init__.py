"""The exact method: a dynamic program over sets of started ops, bounded from below and above, many states at a time.

Level k holds partial schedules with k started ops. Ops are appended in order of their starts on the cores; an op starts
as soon as its predecessors and cores allow, on one core or spread. Every schedule that cannot be shifted to the left is
reached. From a level the next one is made for all states at once, and a state is dropped when

 1. another op could end before its new op starts (Giffler and Thompson, 1960: it could have been put in between);
 2. its new op is spread, exclusive and has no successors, while ops with successors wait: it can as well run last;
 3. its lower bound reaches the target, incumbent x (1 - gap). The bounds are the weights of the bounds module with the
    part of running ops still to come; the ways to the end; and, while one-core ops hold cores until time F, no op is
    spread before F: ops that one-core latencies cannot bring in before F do all their work after it;
 4. another state has started the same ops and is nowhere later: clock, cores, ends that successors wait for;
 5. the level is wider than allowed. The least bound of the states dropped for this reason stays as the proven bound;
 6. its last two ops could change places (both start now, or both are spread and exclusive) and are not in order;
 7. its new op overtakes one that is alike, has no other predecessors and as many successors or more: the two could
    change places in any schedule.

Links are not bound by the order of starts on the cores: they start as soon as they can. If nothing is dropped by rule
5, the better of what is found and the target is proven. Wider and wider passes give better incumbents first and the
proof last; the same input gives the same passes.
"""

from phaze.schedule.frontier.passes import Outcome, search_frontier

__all__ = ["Outcome", "search_frontier"]
