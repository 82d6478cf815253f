"""`vitrail finetune`: fine-tune a vision-language checkpoint on conversations."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.data.conversations import CAPTION_PROMPT
from vitrail.errors import ConfigError
from vitrail.recipe.finetuning import FinetuneConfig, FinetunePlan, finetune

Flag = Parameter(negative="")


def finetune_model(
    model: str,
    data: str,
    /,
    *,
    out: Path | None = None,
    dry_run: Annotated[bool, Flag] = False,
    part_lr: Annotated[list[str] | None, Flag] = None,
    target: Annotated[list[str] | None, Flag] = None,
    device: str | None = None,
    method: Literal["lora", "full", "qlora"] = "lora",
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    lr: float | None = None,
    epochs: float = 1.0,
    steps: int | None = None,
    batch_size: int = 8,
    gradient_accumulation_steps: int = 1,
    max_length: int | None = None,
    overflow: Literal["refuse", "cut"] = "refuse",
    data_format: str | None = None,
    image_folder: str | None = None,
    caption_prompt: str = CAPTION_PROMPT,
    dtype: Literal["float32", "bfloat16"] | None = None,
    gradient_checkpointing: Annotated[bool, Flag] = False,
    save_every: int = 100,
    num_workers: int = 0,
    seed: int = 0,
) -> None:
    """Fine-tune a vision-language model on conversations, with LoRA by default. The same command resumes.

    OUT/adapter holds the LoRA adapter in PEFT's format with a model card, OUT/final the weights with it merged.

    Parameters
    ----------
    model
        A Hugging Face folder or hub id, or a folder in Vitrail's format.
    data
        Conversations: a file or folder of any format with turns, such as LLaVA's JSON, ShareGPT or OpenAI messages; a
        folder of images with captions; or WebDataset shards: a tar file, a folder, a pattern, or a URL of these.
    out
        Folder for checkpoints, logs, the adapter and the final weights.
    dry_run
        Only print modules, parameters, an estimate of the memory, samples and steps.
    part_lr
        Learning rate of a part as PART=RATE, such as tower=1e-6; 0 freezes it. May be repeated.
    target
        Pattern of the layers with adapters, such as "decoder.*.q" or "connector". May be repeated. Default: all linear
        layers of the decoder's blocks.
    device
        cpu or cuda. Default: cuda if available.
    method
        lora trains adapters, full all weights, qlora adapters over frozen 4-bit weights, with 8-bit optimizer state.
    rank
        Rank of the adapters.
    alpha
        The update of a layer is multiplied by alpha / rank.
    dropout
        Dropout of the inputs of the adapters.
    lr
        Peak learning rate. Default: 1e-4 for LoRA, 1e-5 for all weights.
    epochs
        Passes over the data.
    steps
        Optimizer steps, instead of epochs.
    batch_size
        Conversations of a step.
    gradient_accumulation_steps
        Micro-batches of a step.
    max_length
        Tokens of a row of packed conversations. Default: 2048, or the model's context if that is smaller.
    overflow
        What happens to a longer conversation: refuse stops with an error that names it, cut truncates it.
    data_format
        Format of the data. Default: detected.
    image_folder
        Folder of the images and videos. Default: that of the data.
    caption_prompt
        Question about an image or video that has a caption instead of turns.
    dtype
        Dtype of the weights. Default: bfloat16 on a GPU, float32 on the CPU.
    gradient_checkpointing
        Recompute activations in the backward pass: less memory, more time.
    save_every
        Steps between checkpoints.
    num_workers
        Worker processes that load the data.
    seed
        Seed of the adapters, the order of the data and the dropout.
    """
    settings: dict[str, Any] = {
        name: value for name, value in locals().items() if name in FinetuneConfig.__struct_fields__
    }
    config = FinetuneConfig(targets=tuple(target or ()), part_lrs=parse_part_rates(part_lr or []), **settings)
    if dry_run:
        print("\n".join(FinetunePlan(config, device).format_summary()))
        return
    if out is None:
        raise ConfigError("--out is missing", "give the folder for checkpoints, logs and the adapter")
    print(f"→ {finetune(config, out, device=device)}")


def parse_part_rates(rates: list[str]) -> dict[str, float]:
    """Parse PART=RATE arguments."""
    parsed = {}
    for rate in rates:
        part, _, value = rate.partition("=")
        try:
            parsed[part] = float(value)
        except ValueError:
            raise ConfigError(f"--part-lr {rate!r} is not PART=RATE", "write, for example, tower=1e-6") from None
    return parsed
