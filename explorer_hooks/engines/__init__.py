"""What weights are loaded into: one small protocol, and an engine a module."""
