"""Commands beside training: plan a run, report on it, evaluate a model, make a tiny one."""
