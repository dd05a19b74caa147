"""Faults on purpose: `python -m tests.faults --kills 20` kills commands at random moments and sees what is left."""
