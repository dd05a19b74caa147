"""Sinks against diagonals."""
