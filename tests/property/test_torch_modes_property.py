"""Whatever modes of torch a program is in, all that is saved, loaded or received is the same."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import trainer_hooks as trainer
from explorer_hooks import ExplorerHook, Staging, TransformersModel
from explorer_hooks.weights import WeightsReader
from syncd.protocol.policy import SyncSettings
from tests.checkpoints import Net, same, train
from tests.delta_saves import full, is_delta, offered, rebuilt
from tests.explorers import held
from tests.hooks import written
from tests.jobs import SmallJob
from tests.merging import assert_equal
from tests.unit.test_weight_transfer import filled, received
from tests.weight_groups import transfer
from trainer_hooks.fast_path import WeightSender


class OnMeta(TorchFunctionMode):
    """A default device of a program's own making."""

    def __torch_function__(
        self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        makes = func in {torch.empty, torch.zeros, torch.tensor}
        return func(*args, **({"device": "meta"} if makes else {}) | (kwargs or {}))


@contextmanager
def switched(switch: Callable[[Any], object], to: object, back: object) -> Iterator[None]:
    switch(to)
    try:
        yield
    finally:
        switch(back)


MODES: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    torch.inference_mode,
    torch.no_grad,
    OnMeta,
    partial(torch.device, "meta"),
    partial(switched, torch.set_default_device, "meta", None),
    partial(switched, torch.set_default_dtype, torch.float64, torch.float32),
    partial(switched, torch.use_deterministic_algorithms, True, False),
)
adamw = torch.optim.AdamW


@given(st.permutations(MODES))
@settings(max_examples=8)
def test_the_modes_of_a_program_change_no_bit(modes: list[Any]) -> None:
    coming = cycle(modes)
    with torch.inference_mode():
        served = Net()

    def call(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with next(coming)():
            return work(*given, **named)

    for layout, cast, deltas in (
        ("sharded", None, False),
        ("full", "bf16", False),
        ("sharded", "bf16", True),
    ):
        dtype = torch.bfloat16 if cast else torch.float32
        with TemporaryDirectory() as folder, offered(Path(folder)) as job:
            model, again, rest = Net(), Net(), {"seen": torch.ones(2)}
            optimizer, its = adamw(model.parameters()), adamw(again.parameters())
            hook = call(
                trainer.TrainerHook,
                folder,
                model,
                optimizer=optimizer,
                settings=SyncSettings(deltas=deltas),
                saving=trainer.SaveSettings(layout=layout, sync_dtype=cast),  # type: ignore[arg-type] # names will do
                user_state=lambda: rest,  # noqa: B023 - called here
            )
            compiled = torch.compile(hook.after_step, backend="eager")
            seen: dict[str, torch.Tensor] = {}
            for step in range(1, 5):
                train(model, optimizer, 1)
                call(compiled if step % 2 else hook.after_step, step)
                written(hook)
                seen = rebuilt(job, step, seen) if is_delta(job, step) else full(job, step)
                state = model.state_dict().items()
                assert_equal(
                    seen, {name: one.to(dtype if one.ndim else one.dtype) for name, one in state}
                )
            call(hook.save_checkpoint, 4)
            call(hook.close)
            call(trainer.load_checkpoint, folder, served)
            assert_equal(served.state_dict(), model.state_dict())
            ahead = train(model, optimizer, 1)
            assert call(trainer.latest_checkpoint, folder) == 4
            found = call(trainer.load_checkpoint, folder, again, optimizer=its)
            assert same([found.user_state, train(again, its, 1)], [rest, ahead])
            assert same(its.state_dict(), optimizer.state_dict())

    with TemporaryDirectory() as folder:
        job = SmallJob(Path(folder))
        stream = call(trainer.WeightStream, folder)
        explorer = call(
            ExplorerHook, folder, "e", TransformersModel(served), staging=Staging(f"{folder}/stage")
        )
        for step in range(1, 4):
            train(model, optimizer, 1)
            call(stream.save, step, model.state_dict())
            stream.wait()
            job.run()
            call(explorer.pull, 0)
            with held(job) as version, WeightsReader(version, mmap=step == 2) as reader:
                for source in (explorer, reader):
                    tensors = call(dict, source.state_dict_iterator())
                    assert_equal(served.state_dict(), tensors)
                    assert_equal(tensors, model.state_dict())
                    assert not any(one.zero_().is_inference() for one in tensors.values())
        explorer.close()
        stream.close()
    for receive in (received, filled(served)):
        _, got = transfer(partial(call, WeightSender(model).send), partial(call, receive))
        assert_equal(got.result(), model.state_dict())
