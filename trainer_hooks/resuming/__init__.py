"""From a full checkpoint back into a model, on whatever ranks."""
