"""The forecast of a recipe, as data, text and drawings."""
