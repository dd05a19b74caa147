"""Fuzzing of everything that rheoscope reads: `python -m tests.fuzz --minutes 10 READER`."""
