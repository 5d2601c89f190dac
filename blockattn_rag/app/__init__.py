"""The command line and the pipeline behind it."""
