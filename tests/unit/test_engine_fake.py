import threading
from pathlib import Path

import pytest

from explorer_hooks.engines.conformance import make_version, random_tensors
from explorer_hooks.engines.fake import Call, FakeEngine
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.reader import LeasedVersion
from syncd.protocol.errors import SyncdError


def version(folder: Path, sequence: int) -> LeasedVersion:
    tensors = random_tensors({"weight": TensorSpec("F32", (3,))}, sequence)
    return make_version(folder / str(sequence), tensors, sequence=sequence)


def test_it_remembers_what_it_was_asked_and_serves_what_it_loaded(
    engine: FakeEngine, tmp_path: Path
) -> None:
    first, second = version(tmp_path, 1), version(tmp_path, 2)
    with pytest.raises(SyncdError, match="no weights"):
        engine.answer()
    engine.check(first)
    engine.load(first)
    one = engine.answer()
    engine.load(second)
    assert engine.answer().digest != one.digest
    assert (engine.answer().sequence, engine.answer().folder) == (2, second.folder)
    assert engine.calls == [Call("check", 1), Call("load", 1), Call("load", 2)]
    assert engine.asked("load") == [1, 2]


def test_it_fails_where_it_is_told_and_no_more_often(engine: FakeEngine, tmp_path: Path) -> None:
    first, second = version(tmp_path, 1), version(tmp_path, 2)
    engine.load(first)
    engine.fail("load", OSError("no"), sequence=2, times=2)
    engine.load(first)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            engine.load(second)
        assert engine.answer().sequence == 1
    engine.load(second)
    engine.fail("load", OSError("half"), torn=True)
    with pytest.raises(OSError, match="half"):
        engine.load(first)
    with pytest.raises(SyncdError, match="no weights"):
        engine.answer()
    with pytest.raises(AttributeError, match="loads"):
        engine.fail("loads", OSError())


def test_a_call_hangs_until_it_is_released(engine: FakeEngine, tmp_path: Path) -> None:
    thread = threading.Thread(target=engine.load, args=(version(tmp_path, 1),))
    with engine.hanging("load") as hang:
        thread.start()
        assert hang.reached.wait(60)
        assert engine.served is None
    thread.join(60)
    assert engine.answer().sequence == 1


def test_it_answers_no_request_while_it_is_paused(engine: FakeEngine, tmp_path: Path) -> None:
    engine.load(version(tmp_path, 1))
    for call in (engine.resume, engine.attach):
        engine.pause()
        with pytest.raises(SyncdError, match="paused"):
            engine.answer()
        call()
        assert engine.answer().sequence == 1
