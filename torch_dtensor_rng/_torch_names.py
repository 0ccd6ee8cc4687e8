"""The private torch names that the package stands on, in one place, checked before they are used."""

import importlib

import torch

SUPPORTED = "2.11 to 2.15"

# "module:attribute.attribute", each looked up once.
PRIVATE_NAMES = (
    "torch:_disable_dynamo",
    "torch._C:_len_torch_dispatch_stack",
    "torch._functorch.compile_utils:rand_ops",
    "torch.distributed._functional_collectives:_are_we_tracing",
    "torch.distributed._functional_collectives:all_reduce",
    "torch.distributed._local_tensor:LocalTensor._local_tensors",
    "torch.distributed._local_tensor:LocalTensorMode.disable",
    "torch.distributed._local_tensor:_get_rng_state",
    "torch.distributed._local_tensor:_map_to_rank_local_val",
    "torch.distributed._local_tensor:_set_rng_state",
    "torch.distributed._local_tensor:enabled_local_tensor_mode",
    "torch.distributed._local_tensor:maybe_run_for_local_tensor",
    "torch.distributed._mesh_layout:_MeshLayout.remap_to_tensor",
    "torch.distributed.device_mesh:DeviceMesh._is_current_rank_part_of_mesh",
    "torch.distributed.device_mesh:DeviceMesh._sym_get_coordinate",
    "torch.distributed.device_mesh:_get_device_handle",
    "torch.distributed.tensor:DTensor._op_dispatcher._allow_implicit_replication",
    "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
    "torch.distributed.tensor:DTensor._op_dispatcher._dispatch_get_local_results_slow_path",
    "torch.distributed.tensor:DTensor._op_dispatcher.redistribute_local_args",
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.propagate",
    "torch.distributed.tensor:DTensor._op_dispatcher.unwrap_to_op_info",
    "torch.distributed.tensor:DTensor._op_dispatcher.wrap",
    "torch.distributed.tensor._api:rand",
    "torch.distributed.tensor._api:randn",
    "torch.distributed.tensor._dispatch:is_rng_supported_mesh",
    "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "torch.distributed.tensor._random:OffsetBasedRNGTracker",
    "torch.distributed.tensor._random:_rng_tracker",
    "torch.distributed.tensor._random:is_rng_supported_mesh",
    "torch.distributed.tensor._random:manual_seed",
    "torch.distributed.tensor._dtensor_spec:DTensorSpec.shard_order",
    "torch.distributed.tensor.placement_types:Shard.local_shard_size_and_offset",
    "torch.distributed.tensor.placement_types:_StridedShard",
    "torch:ops.aten._efficient_attention_forward",
    "torch.fx.experimental.proxy_tensor:get_proxy_mode",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.nn.init:_no_grad_trunc_normal_",
)

# Checked by install(), as their import takes a second.
DYNAMO_NAMES = (
    "torch._dynamo.guards:GuardBuilder.ID_MATCH",
    "torch._dynamo.guards:install_guard",
    "torch._dynamo.utils:proxy_args_kwargs",
    "torch._dynamo.variables.base:VariableTracker.as_proxy",
    "torch._dynamo.variables.base:VariableTracker.realize",
    "torch._dynamo.variables.builder:wrap_fx_proxy",
    "torch._dynamo.variables.tensor:TensorVariable.call_method",
    "torch._dynamo.variables.torch:TorchInGraphFunctionVariable.call_function",
    "torch._dynamo.variables.user_defined:UserDefinedObjectVariable",
)


def missing(names: tuple[str, ...] = PRIVATE_NAMES) -> list[str]:
    """The names of ``names`` that the running torch does not have."""
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        value = importlib.import_module(module)
        for attribute in path.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        return False
    return True


def check(names: tuple[str, ...] = PRIVATE_NAMES) -> None:
    """Raises ImportError, naming torch's version and what moved, unless all of ``names`` are there."""
    if absent := missing(names):
        raise ImportError(
            f"torch_dtensor_rng supports torch {SUPPORTED}; torch {torch.__version__} has no {', '.join(absent)}."
        )
