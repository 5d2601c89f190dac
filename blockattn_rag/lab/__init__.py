"""Training, repair, evaluation, benchmarks and capacity planning."""
