"""Grading: rows.py reads problems and gold answers, extract.py finds answers, answers.py compares them,
worker.py runs graders."""
