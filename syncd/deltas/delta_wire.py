"""The messages between the process that makes a delta and the daemon that started it."""

from __future__ import annotations

import struct
from typing import Final

#: The parent's message: how many tensors follow, and their elements in all.
PLAN: Final = struct.Struct("<IQ")
#: A tensor: its number in the order of the names, bytes of an element, elements; descriptor and
#: offset of its bytes in the base and in the target; its digest in both.
TENSOR: Final = struct.Struct("<IBQiQiQ16s16s")
#: A message of the child: its kind, the bytes of the target that are compared, the tensor's number,
#: the block's, the bytes that follow, the elements that changed, the xxh3-64 of the bytes.
MESSAGE: Final = struct.Struct("<BQIIIIQ")
#: Kinds: a sign of life; a block; the end; no delta, for a reason that follows as text; a tensor
#: that is not what its manifest says, in the base (block 0) or the target (block 1).
ALIVE: Final = 0
CHANGED: Final = 1
DONE: Final = 2
REFUSED: Final = 3
DIFFERS: Final = 4
