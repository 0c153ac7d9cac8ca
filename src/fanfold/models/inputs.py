"""Inputs to run a whole model once, so that layers whose code connects an FFN's parts can be seen at work."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .linears import quiet


def default_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Small random inputs for a transformers model, from its config; None if we do not know what it reads."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    main = getattr(model, "main_input_name", "input_ids")
    parameters = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    out: dict[str, Any] = {}
    if main == "input_ids" and getattr(text, "vocab_size", None):
        out["input_ids"] = torch.randint(0, text.vocab_size, (2, 6), generator=generator)
    elif main == "pixel_values" and getattr(config, "image_size", None):
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        out["pixel_values"] = torch.randn(1, config.num_channels, *size, generator=generator)
    else:
        return None
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        out["decoder_input_ids"] = torch.randint(0, text.vocab_size, (2, 5), generator=generator)
    if "use_cache" in parameters:
        out["use_cache"] = False
    return out


def placed(value: Any, like: Tensor) -> Any:
    """A tensor on the device of `like`, and in its dtype if it is a float one; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)


def record_calls(
    model: nn.Module, paths: list[str], inputs: Any
) -> tuple[dict[str, tuple[tuple, dict[str, Any]]], str]:
    """({path: (args, kwargs)} of the first call of each module in one eval run of `model`, error text or "").

    inputs  a dict of keyword arguments, a tuple of arguments or one tensor. Its hooks do not fire; modes are put back.
    """
    calls: dict[str, tuple[tuple, dict[str, Any]]] = {}

    def recorder(path: str) -> Any:
        def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, (args, kwargs))

        return hook

    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    error = ""
    with torch.no_grad(), quiet(model):
        handles = [
            model.get_submodule(path).register_forward_pre_hook(recorder(path), with_kwargs=True) for path in paths
        ]
        try:
            if isinstance(inputs, dict):
                model(**{k: placed(v, like) for k, v in inputs.items()})
            elif isinstance(inputs, (tuple, list)):
                model(*(placed(v, like) for v in inputs))
            else:
                model(placed(inputs, like))
        except Exception as failure:  # the model is somebody else's code: whatever it raises is the reason we report
            error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        finally:
            for handle in handles:  # `quiet` drops them, but not what torch notes beside of hooks that take kwargs
                handle.remove()
    return calls, error
