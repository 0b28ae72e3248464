"""Weights by broadcast: the offer, the meeting, and the weight group.

The package imports the modules of ``syncd.coordination`` for participants and waits. Its users are
``trainer.py`` and ``explorer.py`` of ``syncd.coordination``. To learn the code, read ``offer.py``
first.
"""
