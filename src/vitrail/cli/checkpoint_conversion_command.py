"""`vitrail import` and `vitrail export`: conversion between the Hugging Face layout and Vitrail's format."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.hub import checkpoint_conversion
from vitrail.hub.checkpoint_conversion import Conversion, count_bytes

OutputFolder = Annotated[Path, Parameter(alias="-o")]


def import_checkpoint(source: str, /, *, out: OutputFolder) -> None:
    """Convert a Hugging Face model, a GGUF file or a llama2.c file to Vitrail's format, with its tokenizer.

    Example: vitrail import llava-hf/llava-1.5-7b-hf -o out/llava

    Parameters
    ----------
    source
        A folder, a hub id, a .gguf file or a llama2.c .bin file.
    out
        The folder to create.
    """
    _print_summary(checkpoint_conversion.import_checkpoint(source, out))


def export_checkpoint(
    model: str, /, *, out: OutputFolder, family: str | None = None, adapter: Path | None = None
) -> None:
    """Convert a model to the Hugging Face layout, with its tokenizer.

    Example: vitrail export out/llava -o out/llava-hf

    Parameters
    ----------
    model
        A folder in Vitrail's format, or the name of a model that ships.
    out
        The folder to create.
    family
        Checkpoint family of the result, such as llava or qwen3. Default: the first that fits the model.
    adapter
        Folder of a PEFT LoRA adapter to merge into the weights.
    """
    _print_summary(checkpoint_conversion.export_checkpoint(model, out, family=family, adapter=adapter))


def _print_summary(conversion: Conversion) -> None:
    files = sorted(file for file in conversion.folder.iterdir() if file.is_file())
    width = max(len(file.name) for file in files)
    parameters = sum(p.numel() for p in conversion.model.parameters())
    size = _format_bytes(count_bytes(conversion.folder))
    print(f"{conversion.folder}: {conversion.description}, {parameters:,} parameters, {size}")
    for file in files:
        print(f"  {file.name:{width}}  {_format_bytes(file.stat().st_size):>9}")
    if conversion.tokenizer is None:
        print("  the source has no tokenizer.json, so none is written")
    for warning in conversion.warnings:
        print(f"  {warning}")


def _format_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
