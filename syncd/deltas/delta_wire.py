"""The messages between the daemon and the child process that makes a delta."""

from __future__ import annotations

import struct
from typing import Final

#: The parent's message: the number of tensors that follow, and the number of all their elements.
PLAN: Final = struct.Struct("<IQ")
#: A tensor: its number in the order of the names; the bytes of an element; the number of elements;
#: the descriptor and offset of its bytes, in the base and in the target; its digest in both.
TENSOR: Final = struct.Struct("<IBQiQiQ16s16s")
#: A message of the child: its kind; the bytes of the target that were compared so far; the number
#: of the tensor; the number of the block; the number of bytes that follow; the number of elements
#: that changed; the xxh3-64 of the bytes that follow.
MESSAGE: Final = struct.Struct("<BQIIIIQ")
#: The kinds of messages. ALIVE: a sign of life. CHANGED: an encoded block follows. DONE: the end.
#: REFUSED: there can be no delta; the reason follows as text. DIFFERS: a tensor differs from its
#: manifest, in the base (the number of the block is 0) or in the target (1).
ALIVE: Final = 0
CHANGED: Final = 1
DONE: Final = 2
REFUSED: Final = 3
DIFFERS: Final = 4
