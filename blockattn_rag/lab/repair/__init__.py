"""Repair of stock models: fitting, choosing and measuring a recipe, without labels."""
