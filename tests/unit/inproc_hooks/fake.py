"""Modules with children, parameters and forward hooks, and events of a device, as torch has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Parameter:
    """A parameter of some size on some device."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        self.device = type("Device", (), {"type": device})()

    def numel(self) -> int:
        return self.size


class Handle:
    """Takes a hook away."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        self._hooks.remove(self._hook)


class Module:
    """A module that calls its children in order."""

    def __init__(self, size: int = 0, device: str = "cpu", **children: Module) -> None:
        self.children_ = children
        self.own = [Parameter(size, device)] if size else []
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.work: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Module]:
        return iter(self.children_.values())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return iter(self.children_.items())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, child in self.children_.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def parameters(self) -> Iterator[Parameter]:
        for module in self.modules():
            yield from module.own

    def register_forward_pre_hook(self, hook: Any) -> Handle:
        self.before.append(hook)
        return Handle(self.before, hook)

    def register_forward_hook(self, hook: Any) -> Handle:
        self.after.append(hook)
        return Handle(self.after, hook)

    def forward(self) -> None:
        self.work()
        for child in self.children_.values():
            child()

    def __call__(self) -> None:
        for hook in list(self.before):
            hook(self, ())
        self.forward()
        for hook in list(self.after):
            hook(self, (), None)

    def hooks(self) -> int:
        """Return the hooks on it and below."""
        return sum(len(m.before) + len(m.after) for m in self.modules())


class ModuleList(Module):
    """Known by its name."""


class PPMissingLayer(Module):
    """vLLM's place of a layer that another worker has."""


class Attention(Module):
    """An attention block."""


class Dense(Module):
    """An MLP."""


class SparseMoeBlock(Module):
    """Experts."""


class Layer(Module):
    """A decoder layer."""


def listed(**children: Module) -> Module:
    """Return a list of layers under their names."""
    return ModuleList(0, "cpu", **children)


def model(layers: int = 3, device: str = "cpu") -> Module:
    """Return a decoder with attention and MLP in each layer."""
    made = {
        str(i): Layer(self_attn=Attention(4, device), norm=Module(1, device), mlp=Dense(8, device))
        for i in range(layers)
    }
    return Module(model=Module(embed=Module(100, device), layers=listed(**made)), head=Module(100, device))


class Event:
    """An event of a device; done when the device says so."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.at = cuda, 0

    def record(self) -> None:
        self._cuda.now += 1
        self.at = self._cuda.now

    def query(self) -> bool:
        return self._cuda.done >= self.at

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "waits for the device"
        return float(end.at - self.at)


class FakeCuda:
    """``torch.cuda``: one tick for each event recorded, of which ``done`` are over."""

    def __init__(self) -> None:
        self.now = 0
        self.done = 1 << 30
        self.initialised = self.capturing = self.compiling = False

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def is_initialized(self) -> bool:
        return self.initialised

    def is_current_stream_capturing(self) -> bool:
        return self.capturing
