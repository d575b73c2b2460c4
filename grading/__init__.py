"""Grading: rows.py reads problems and gold answers, answers.py compares answers, worker.py runs graders."""
