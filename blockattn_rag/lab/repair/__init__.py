"""Repair of a stock model's block mode: fitting, choosing and measuring a recipe.

The teacher is the same model in full mode, so no labels are needed. A fitted correction is applied
when passages are encoded, so it has no cost per answer.
"""
