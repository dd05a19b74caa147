"""The command line: one module per stage of the pipeline."""
