"""Lower bounds on the step time, from closed forms over whole strategies to partly chosen pipelines."""
