"""The files that grow by a line for each thing that happens, and a power loss at every call."""

import random
from pathlib import Path

from syncd.storage.append import append, last_lines
from tests.crash.power import RecordingStorage, losses
from tests.storages import FastStorage

#: Bytes of so many lines as the tests have.
LIMIT = 40
LINES = 4


def line(number: int) -> bytes:
    return f"line {number:04}".encode()


def test_a_power_loss_while_a_new_file_is_begun_takes_no_durable_line(tmp_path: Path) -> None:
    root = tmp_path / "job"
    root.mkdir()
    storage = RecordingStorage(root, foreign=lambda _: False)
    chance = random.Random(7)
    durable = [line(0)]
    seen: set[object] = set()

    def look(number: int, method: str, _: Path) -> None:
        for loss in losses(storage.disk, f"call {number}, {method}", {}, chance, 3):
            if loss.key in seen:
                continue
            seen.add(loss.key)
            after = tmp_path / str(len(seen))
            loss.onto(after)
            found = last_lines(FastStorage(), after / "log.jsonl")
            # The oldest may be gone, a file at a time; a line that is being written may be torn.
            kept = [one for one in found if one in durable]
            assert kept == durable[len(durable) - len(kept) :], loss.name
            assert len(kept) >= min(len(durable), LINES), loss.name

    append(storage, root / "log.jsonl", durable[0] + b"\n", durable=True, limit=LIMIT)
    storage.watch = look
    for number in range(1, 3 * LINES):
        append(storage, root / "log.jsonl", line(number) + b"\n", durable=True, limit=LIMIT)
        durable.append(line(number))
    assert len(seen) > 3 * LINES
    assert len(last_lines(FastStorage(), root / "log.jsonl")) == 2 * LINES
