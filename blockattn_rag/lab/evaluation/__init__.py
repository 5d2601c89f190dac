"""Measurement of the accuracy and fidelity of full mode and of block mode with recipes."""
