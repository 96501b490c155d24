"""Recipes (the things under test), their capabilities, and how files of recipes are loaded."""
