"""Routing: what attention scores are made of."""
