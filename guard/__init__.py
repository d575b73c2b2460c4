"""Guards: what refuses a run before it costs anything, and what watches it afterwards."""
