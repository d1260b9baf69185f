"""What is placed: the problem, every possible stage, and what each stage costs and holds."""
