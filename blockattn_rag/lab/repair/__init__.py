"""Repair of block mode for a stock model: fitting, choosing and measuring a recipe.

The teacher is the model itself in full mode, so no labels are needed. A fitted correction is
applied while passages are encoded, so it costs nothing per answer.
"""
