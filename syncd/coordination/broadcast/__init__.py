"""Weights by broadcast: the offer, the meeting, and the weight group.

The synchronizers of the trainer and the explorers use this package. Read ``offer.py`` first.
"""
