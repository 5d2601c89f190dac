"""Evaluation: accuracy of full mode and block mode, and fidelity of block mode to full mode."""
