"""Shows a run: one page that opens from disk."""
