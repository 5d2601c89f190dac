"""Repair of a stock model's block mode: fitting, choosing and measuring a recipe, without labels."""
