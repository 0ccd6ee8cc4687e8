"""Random numbers for PyTorch's DTensor, drawn from the live generator."""

from . import _torch_names

_torch_names.check()

from ._checkpoint import RNGState  # noqa: E402
from ._describe import describe  # noqa: E402
from ._factories import bernoulli, normal, rand, randint, randn, randperm  # noqa: E402
from ._install import Installation, RNGSyncDebugMode, install, uninstall  # noqa: E402
from ._seed import manual_seed  # noqa: E402
from ._sync import RNGDesyncError, check_rng_sync  # noqa: E402

__all__ = [
    "Installation",
    "RNGDesyncError",
    "RNGState",
    "RNGSyncDebugMode",
    "bernoulli",
    "check_rng_sync",
    "describe",
    "install",
    "manual_seed",
    "normal",
    "rand",
    "randint",
    "randn",
    "randperm",
    "uninstall",
]
