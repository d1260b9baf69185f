"""The search for the accelerator to build: lower bounds that prune, workers that evaluate, a journal that resumes."""
