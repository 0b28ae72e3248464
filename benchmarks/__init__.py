"""Measurements behind the numbers in the documentation; see each module for how to repeat it."""
