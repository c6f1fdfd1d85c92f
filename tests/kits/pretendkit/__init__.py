"""A pretend accelerator: torch on a machine without a GPU behaves as with ``cuda:0``, and tells
what a real one would have refused and where the host would have waited for it.

A tensor on the device holds a tensor of the CPU (`tensor.py`). Every operation is computed there,
so the numbers are the CPU's, after the rules of a real device were asked (`rules.py`)::

    with pretend_cuda() as seen:
        trainer = Trainer(load_config("shapes/flow_grpo", ["model.device=cuda"]))
        seen.clear()
        trainer.step()
    print(seen.waits)

What it cannot show is in docs/distributed.md: kernels, memory, speed and rounding are the CPU's.
"""

from pretendkit.device import pretend_cuda as pretend_cuda
from pretendkit.tensor import DeviceTensor as DeviceTensor
from pretendkit.tensor import Seen as Seen
