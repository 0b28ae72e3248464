"""Weights by broadcast: the offer, the meeting, and the weight group.

The package contains:

- the offer that the trainer writes, and the verdict on the offer;
- the store that all members of an offer connect to;
- the process group with its deadlines;
- the metadata of the weights.

The package imports the modules of ``syncd.coordination`` for participants and waits. Its users are
``trainer.py`` and ``explorer.py`` of ``syncd.coordination``. To learn the code, read ``offer.py``
first.
"""
