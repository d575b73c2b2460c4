"""Commands besides training: plan a run, report on runs, evaluate models, pretrain the demo's tiny model."""
