"""What the front end of torch.compile is taught while the package is installed: to put a passed generator, and
``random_``, into the graph where they are for a DTensor. It breaks the graph at both, and still does for plain tensors.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.distributed.tensor import DTensor

from . import _traced

# What is patched: the variables that stand for a call of a tensor's method and of a torch function.
CALLS = ((TensorVariable, "call_method"), (TorchInGraphFunctionVariable, "call_function"))


class _InGraph(VariableTracker):
    """A generator that is a node of the graph."""

    def __init__(self, proxy: Any, generator: torch.Generator):
        super().__init__()
        self.proxy = proxy
        self.generator = generator

    def as_proxy(self) -> Any:
        return self.proxy

    def python_type(self) -> type:
        return type(self.generator)


def random_(x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """``x.random_``, by a name that is not refused."""
    return x.random_(*args, **kwargs)  # type: ignore[return-value]


def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call_method(self, tx, name, args, kwargs)`` or ``call_function(self, tx, args, kwargs)`` with generators put into the
    graph, where there is a DTensor in the call."""

    @functools.wraps(call)
    def with_generators(self: Any, tx: Any, *rest: Any) -> Any:
        *name, args, kwargs = rest
        if not _any_is_dtensor((self, *args, *kwargs.values())):
            return call(self, tx, *rest)
        args = [_put_in(tx, one) for one in args]
        kwargs = {key: _put_in(tx, one) for key, one in kwargs.items()}
        if name == ["random_"]:
            return wrap_fx_proxy(
                tx, tx.output.create_proxy("call_function", random_, *proxy_args_kwargs([self, *args], kwargs))
            )
        return call(self, tx, *name, args, kwargs)

    return with_generators


def _any_is_dtensor(variables: Iterable[VariableTracker]) -> bool:
    return any(
        isinstance(one, TensorVariable) and isinstance(one.proxy.node.meta.get("example_value"), DTensor)
        for one in (variable.realize() for variable in variables)
    )


def _put_in(tx: Any, variable: VariableTracker) -> VariableTracker:
    variable = variable.realize()
    if (
        not isinstance(variable, UserDefinedObjectVariable)
        or not isinstance(generator := variable.value, torch.Generator)
        or variable.source is None
    ):
        return variable
    install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
    proxy = tx.output.create_proxy("call_function", _traced.generator_at, (_traced.handle_of(generator),), {})
    proxy.node.meta["example_value"] = generator
    return _InGraph(proxy, generator)
