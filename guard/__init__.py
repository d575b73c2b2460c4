"""Guards: checks that refuse a faulty run before its first step, and code that watches a training run."""
