"""Repair of stock models: fitting, choosing and measuring a recipe. Needs no labels."""
