"""Many ranks on one machine: fake process groups that play each rank in turn with real kernels, and real processes
over gloo."""

import datetime
import itertools
import math
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore


def as_rank(
    rank: int, mesh_shape: tuple[int, ...], device: str = "cpu", names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """Makes this process rank ``rank`` of a fake process group, and returns its mesh."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Torch's sharding caches hold the specs, and so the mesh, of the rank that was played before.
    debug._clear_fast_path_sharding_prop_cache()
    debug._clear_python_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    return init_device_mesh(device, mesh_shape, mesh_dim_names=names)


def each_rank(mesh_shape: tuple[int, ...], fn: Callable[[int, DeviceMesh], Any], device: str = "cpu") -> list[Any]:
    """What ``fn(rank, mesh)`` returns on every rank of a mesh, played in turn."""
    # DTensor has a sharding cache in each thread, and as_rank clears that of this one: the backward pass of CUDA tensors
    # must not run in another.
    with torch.autograd.set_multithreading_enabled(False):
        return [fn(rank, as_rank(rank, mesh_shape, device)) for rank in range(math.prod(mesh_shape))]


def coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh_shape)))


def _process(
    rank: int, world_size: int, store: str, results: Any, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        results.put((rank, fn(rank, *args), None))
        dist.barrier()
        dist.destroy_process_group()
        results.close()
        results.join_thread()
        os._exit(0)  # as the demonstration does
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def gloo(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """What ``fn(rank, *args)`` returns on every rank of ``world_size`` processes over gloo. ``fn`` and what it returns
    are pickled; return plain data."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_process, args=(rank, world_size, store, results, fn, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            answers = [results.get(timeout=timeout) for _ in processes]
        finally:
            for process in processes:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
    for rank, _, error in answers:
        assert error is None, f"rank {rank}:\n{error}"
    return [answer for _, answer, _ in sorted(answers, key=lambda one: one[0])]


def default_generator(device: str) -> torch.Generator:
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]
