"""Steering: the feed-forward network as a field on the sphere."""
