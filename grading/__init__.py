"""Grading: formats of data files, which text is the answer, and processes that can be killed."""
