"""Commands: plan a run, report on runs, evaluate models, pretrain the demo's tiny model."""

import configs  # noqa: F401 (first, because configs says what to type if no package is installed)
