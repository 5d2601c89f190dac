"""Training, repair, evaluation and capacity planning."""
