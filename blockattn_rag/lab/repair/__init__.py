"""Repairs block mode of a model that was not block-fine-tuned: fits, chooses and measures a recipe.

The teacher is the model itself in full mode, so no labels are needed. A fitted correction is
applied while passages are encoded, so it costs nothing per answer.
"""
