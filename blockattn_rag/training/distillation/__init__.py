"""Distillation: a small part is trained so that block mode answers as full mode does.

The teacher is the model itself in full mode, so no labels are needed. What is trained acts while
the final block and the answer are computed, and the passages' keys and values stay the model's own.
"""
