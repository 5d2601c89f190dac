"""What the adapters for both frameworks share."""
