"""What a linear with packed weights remembers, and how each call is computed. The FFN: `packed_ffn`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..kernels import cpu, dispatch, packed, packed_op
from ..kernels import torch as torch_ops
from . import stubs
from .linears import is_conv1d
from .packed_weight import PackedWeight, pack, parameter
from .quick import Quick, join, preparable
from .snapshot import mark, version
from .states import AUTOCAST, GRADIENTS, LinearState

if TYPE_CHECKING:
    from .find import Found

EXCHANGED = "its weight was exchanged after the swap"
TABLE = "the table that its weight is tied to has changed"
_plain_linear = nn.functional.linear


class PackedLinearState(LinearState):
    """A linear whose matrix is packed.

    weight   the packed matrix.  stub  what its parameter `weight` is meanwhile (see `stubs`).
    requires_grad, kept  of the original parameter; `kept` is the original itself where it is to be kept.
    owner    (module, name) that goes on holding the original: a tied embedding.
    reloaded whether load_state_dict has written other weights into it.
    found    the FFN that it belongs to, where a layer's own code connects its linears.
    """

    found: Found | None = None

    def __init__(
        self, path: str, backend: str, weight: PackedWeight, stub: nn.Parameter, original: nn.Parameter
    ) -> None:
        super().__init__(path, weight.format, backend)
        self.weight, self.stub = weight, stub
        self.requires_grad = original.requires_grad
        self.kept: nn.Parameter | None = original
        self.owner: tuple[nn.Module, str] | None = None
        self.reloaded = False
        self._table: tuple[Any, ...] | None = None  # the mark of the owner's table when it was packed
        self._table_seen = ""  # the same for compiled code
        self._column: Tensor | None = None  # a number of each of its rows then
        self._bias: tuple[Tensor, Tensor, int] | None = None  # what it was made from, the float32 copy, its number
        weight.watch(stub)

    def __getstate__(self) -> dict[str, Any]:
        untouched = self.untouched(self.stub)
        return {**super().__getstate__(), "_bias": None, "_table": self.table() is None, "untouched": untouched}

    def __setstate__(self, state: dict[str, Any]) -> None:
        untouched = state.pop("untouched")
        self.__dict__.update(state)
        if untouched:
            if stubs.place(self.stub) is None:  # read from a file
                stubs.retype(self.stub, self.stub.dtype)
            self.weight.watch(self.stub)
        else:  # what was written into the stub counts in a copy as well
            self.weight.mark = None
        self._know(self._owned() if state["_table"] else None)

    def forget(self) -> None:
        super().forget()
        self.kept = None
        del self.weight

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter."""
        return self.stub.dtype

    def tie(self, owner: tuple[nn.Module, str]) -> None:
        """The original lives on as a parameter of another module: a tied embedding."""
        self.owner = owner
        self._know(self._owned())

    def _know(self, table: nn.Parameter | None) -> None:
        """The table's numbers are the packed ones."""
        self._table = None if table is None else mark(table)
        self._table_seen = "" if table is None else packed_op.seen(table)
        self._column = None if table is None else column(table).clone()

    def _owned(self) -> nn.Parameter | None:
        if self.owner is None:
            return None
        module, name = self.owner
        found = module._parameters.get(name)
        return found if found is not None and found.shape == self.stub.shape else None

    def tied(self) -> nn.Parameter | None:
        """The original, where a tied module has gone on holding it."""
        return None if self.reloaded else self._owned()

    def table(self) -> nn.Parameter | None:
        """The table that the weight is tied to, if it has changed since it was packed: then it is what counts."""
        table = self._owned()
        if table is None or self._column is None or mark(table) != self._table:
            return table
        # writes through .data are not counted; one to a whole row shows in its first number
        return None if torch.equal(column(table), self._column) else table

    def holds(self, module: nn.Module) -> bool:
        """Whether `module` still has the stub, untouched: then its weights are the packed ones."""
        return module._parameters.get("weight") is self.stub and self._stub_untouched()

    def untouched(self, weight: Any) -> bool:
        """Whether `weight` is the stub, or a tensor in its place that shares its memory (`detach`, functional_call)."""
        if type(weight) not in (Tensor, nn.Parameter) or weight.shape != self.stub.shape or any(weight.stride()):
            return False
        return weight.data_ptr() == self.stub.data_ptr() and self._stub_untouched()

    def _stub_untouched(self) -> bool:
        if stubs.mark(self.stub) == self.weight.mark:
            return True
        if self.weight.mark is None or not stubs.moved(self.stub, self.weight.mark):
            return False
        self.retype(self.stub.dtype)
        return True

    def stands(self, module: nn.Module) -> bool:
        """`holds` for torch.compile and export, which see no addresses; export puts its own tensors in place of
        parameters. A stub alone is one number, expanded."""
        weight = module._parameters["weight"]
        if weight is None or self.weight.mark is None or any(weight.stride()):
            return False
        return weight is self.stub or torch.compiler.is_exporting()

    def retype(self, dtype: torch.dtype) -> None:
        """The model was cast."""
        stubs.retype(self.stub, dtype)
        self.weight.watch(self.stub)

    def bias(self, module: nn.Module) -> Tensor | None:
        """The module's bias as the kernels read it: itself if it is float32, else a copy, made anew when it changes."""
        bias = module._parameters.get("bias")
        if bias is None or readable_bias(bias):
            return bias
        now, known = bias.detach(), self._bias
        # by its numbers: not every way to write to it is counted
        if known is None or now.dtype != known[0].dtype or not torch.equal(now, known[0]):
            copy = now.to("cpu", torch.float32).contiguous()
            self._bias = known = (now.clone(), copy, 1 if known is None else known[2] + 1)
        return known[1]

    def bias_mark(self, module: nn.Module) -> tuple[Any, ...] | None:
        """What changes when `bias` gives another tensor."""
        bias = self.bias(module)
        if bias is None or self._bias is None or bias is not self._bias[1]:
            return None if bias is None else (id(bias), bias.data_ptr())
        return ("copy", self._bias[2])

    def run(self, module: Any, x: Tensor) -> Tensor:
        """One call, with every check."""
        if not x.is_floating_point():
            raise RuntimeError(f"{self.path}: x is {x.dtype}, expected a floating-point tensor")
        if not self.holds(module) and not self.untouched(module._parameters.get("weight")):
            return self._exchanged(module, x)
        table = self.table()
        if table is not None:
            self.step_aside(TABLE)
            return self._plain_table(module, x, table)
        reason = self._objection(module, x)
        if reason is not None:
            self.step_aside(reason)
            return self.plainly(module, x)
        bias = self.bias(module)
        y = self.weight.linear(x, bias)
        self.calls += 1
        dispatch.record("cpu")
        self._prepare(module, x, bias)
        return y

    def traced(self, module: Any, x: Tensor) -> Tensor:
        """One call while torch.compile is tracing."""
        if not self.stands(module):
            return module._fanfold_original.forward(module, x)
        refused = self.gradient_refused()
        if refused is not None:
            return torch.ops.fanfold.packed_refusal(x, self._outputs(module), refused)
        wants = torch.is_grad_enabled() and (x.requires_grad or self.requires_grad_now(module))
        wants = wants or torch_ops.forward_mode()
        bias, table = module.bias, self._owned()
        if wants or torch_ops.autocast_on(x) or dispatch.resolve(self.backend) == "torch" or x.dtype not in cpu._DTYPES:
            dtype = self.dtype if torch_ops.autocast_on(x) else x.dtype
            matrix = self.weight.traced_matrix(dtype) if table is None else self._right_way(module, table).to(dtype)
            return _plain_linear(x, matrix, None if bias is None else bias.to(dtype))
        table = None if table is None else self._right_way(module, table)
        known = self._column if self._column is not None else x.new_empty(0)
        return self.weight.traced(x, None if bias is None else bias.float(), table, known, self._table_seen)

    def plainly(self, module: Any, x: Tensor) -> Tensor:
        """The same function in PyTorch's ops on the dequantized weights: slow, and differentiable in x and bias."""
        dtype = self.dtype if torch_ops.autocast_on(x) else x.dtype
        bias = module.bias
        return _plain_linear(x, self.weight.matrix(dtype), None if bias is None else bias.to(dtype))

    def _plain_table(self, module: Any, x: Tensor, table: Tensor) -> Tensor:
        dtype = self.dtype if torch_ops.autocast_on(x) else x.dtype
        bias = module.bias
        return _plain_linear(x, self._right_way(module, table).to(dtype), None if bias is None else bias.to(dtype))

    def _outputs(self, module: nn.Module) -> int:
        return self.stub.shape[1 if is_conv1d(module) else 0]

    def _right_way(self, module: Any, table: Tensor) -> Tensor:
        """[out, in]."""
        return table.t() if is_conv1d(module) else table

    def gradient_refused(self) -> str | None:
        """What to tell who asks for a gradient of the packed weight."""
        if not torch.is_grad_enabled() or not self.stub.requires_grad:
            return None
        return (
            f"{self.path}: its weight is packed as {self.format} and can get no gradient: call fanfold.unswap(model) "
            "before training"
        )

    def requires_grad_now(self, module: nn.Module) -> bool:
        bias = module._parameters.get("bias")
        return bias is not None and bias.requires_grad

    def _exchanged(self, module: Any, x: Tensor) -> Tensor:
        """Somebody has put in a weight of his own: that is what counts, unless it is made from the stub."""
        if module._parameters.get("weight") is None:
            raise RuntimeError(
                f"{self.path}: its weight is computed (pruning, parametrization), but it is packed as {self.format}, "
                "which is for inference alone: undo that, and call fanfold.unswap(model) before you do it again"
            )
        self.step_aside(EXCHANGED)
        weight, bias = module.weight, module.bias
        if weight.dtype == x.dtype or torch_ops.autocast_on(x):
            return module._fanfold_original.forward(module, x)
        matrix = weight.t() if is_conv1d(module) else weight
        return _plain_linear(x, matrix.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _objection(self, module: nn.Module, x: Tensor) -> str | None:
        bias = module._parameters.get("bias")
        if bias is None and getattr(module, "bias", None) is not None:
            return "its bias is computed (pruning, parametrization)"
        if bias is not None and type(bias) is not nn.Parameter:
            return f"its bias is a {type(bias).__name__}"
        if bias is not None and (bias.shape != (self._outputs(module),) or not bias.is_cpu):
            return f"its bias has shape {tuple(bias.shape)} on {bias.device}"
        seen = torch_ops.transform_active()
        if seen is not None:
            return seen
        if torch_ops.autocast_on(x):
            return AUTOCAST
        if torch.is_grad_enabled():
            refused = self.gradient_refused()
            if refused is not None:
                raise RuntimeError(refused)
            if x.requires_grad or self.requires_grad_now(module):
                return GRADIENTS
        backend = dispatch.resolve(self.backend)
        if backend == "torch":
            return "backend torch"
        reason = packed.linear_why_not(x, self.weight.parts[0], None)
        if reason is not None and backend == "cpu":
            raise dispatch.BackendError(f"backend 'cpu' cannot run {self.path}: {reason}")
        return reason

    def _prepare(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> None:
        """Bind the kernel for further calls like this one."""
        part, *more = self.weight.parts
        if more or not preparable(x):
            return
        kernel = packed.prepare_linear(x, part, bias)
        if kernel is None:
            return
        questions = watch_bias(module, bias)
        places = module._parameters
        watched = [(places, key, p) for key, p in places.items()]
        asked = [*questions, (self.stub.data_ptr, self.stub.data_ptr())]
        table = self._owned()
        if table is not None:
            counted = version(table)
            if counted is None or self._column is None:
                return
            asked += [
                (table.data_ptr, table.data_ptr()),
                (functools.partial(getattr, table, "_version"), counted),
                (functools.partial(torch.equal, column(table), self._column), True),
            ]
        self.quick = Quick(kernel, x, part.shape[0], watched, questions=asked, places=[stubs.place(self.stub)])
        join(self.quick, x, (part.data,) if bias is None else (part.data, bias))

    def save(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        """Put the dequantized weights into a state_dict, in the original's dtype and orientation; where they are tied
        to a table, the table, so that files know them as tied."""
        if self.holds(module) and f"{prefix}weight" in destination:
            table = self._owned()
            if table is not None:
                destination[f"{prefix}weight"] = table.detach()
                return
            made = parameter(self.weight.matrix(self.dtype), module, False).detach()
            destination[f"{prefix}weight"] = made

    def load(self, module: nn.Module, given: Tensor, key: str) -> str | None:
        """Write a state_dict's weight into the packed bytes. -> why it cannot be, or None.

        Float formats round it; integer formats take only what they hold already (their codes are chosen by `swap`).
        """
        if tuple(given.shape) != tuple(self.stub.shape):
            return None  # PyTorch's own message says it
        matrix = given.detach().t() if is_conv1d(module) else given.detach()
        now = self.weight.matrix(self.dtype)
        if torch.equal(matrix.to(now), now):
            return None
        new = [
            pack(m, part.format) for m, part in zip(PackedWeight.split(matrix, self.weight.order), self.weight.parts)
        ]
        if all(torch.equal(a.matrix.data, b.data) for a, b in zip(new, self.weight.parts)):
            self._know(self._owned())  # written to, and still the same
            return None
        if self.format not in packed._FLOATS:
            return f"{key} is packed as {self.format}, and another matrix is given: unswap, load, and swap again"
        self.reloaded = True
        for part, made in zip(self.weight.parts, new):
            part.data.copy_(made.matrix.data)  # in place: bound calls read it there
        return None


def column(table: Tensor) -> Tensor:
    """One number of each row of a table: who writes a row anew changes it."""
    return table.detach().select(1, 0)


def readable_bias(bias: Tensor) -> bool:
    """Whether the kernels read it where it is."""
    return bias.dtype is torch.float32 and bias.is_cpu and bias.is_contiguous()


def watch_bias(module: nn.Module, used: Tensor | None) -> list[tuple[Any, Any]]:
    """(question, answer) pairs that together say that a bias is still what a prepared call reads.

    used  that: the bias itself, or a copy of it.
    """
    bias = module._parameters.get("bias")
    if bias is None or used is None:
        return []
    if readable_bias(bias):
        return [(ask, ask()) for ask in (bias.data_ptr, bias.numel, bias.is_contiguous)]
    source = module._fanfold._bias[0]  # type: ignore[union-attr, index]
    return [(bias.data_ptr, bias.data_ptr()), (functools.partial(torch.equal, source, bias), True)]
