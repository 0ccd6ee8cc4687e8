"""Random numbers for PyTorch's DTensor, drawn from the live generator."""

from . import _torch_names

_torch_names.check()

from ._factories import rand, randint, randn  # noqa: E402
from ._install import Installation, install, uninstall  # noqa: E402
from ._seed import manual_seed  # noqa: E402

__all__ = ["Installation", "install", "manual_seed", "rand", "randint", "randn", "uninstall"]
