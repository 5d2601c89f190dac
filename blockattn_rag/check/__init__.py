"""The oracle, and the check of a model against it. Only tests and ``check`` import this."""
