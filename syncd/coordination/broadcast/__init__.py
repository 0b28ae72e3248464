"""Weights by broadcast: the offer, the meeting, and the weight group.

In it: the offer that the trainer writes and the verdict on it, the store that all members connect
to, the process group with its deadlines, and the metadata of the weights. It imports the flat
modules of ``syncd.coordination`` that know participants and waits; the trainer's and the explorer's
sides import it. Begin with ``offer.py``.
"""
