"""Parsing in a child process with limits of time and memory. Begin with ``isolated.py``."""
