"""Fine-tuning of a vision-language checkpoint on conversations: settings → recipe, memory estimate, model card."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.config import Config, PositiveInt, WorkerCount
from vitrail.data.conversations import CAPTION_PROMPT, ConversationsConfig, ConversationSource
from vitrail.data.sampler import MixtureConfig
from vitrail.data.shards.shard_paths import is_shards
from vitrail.data.shards.shard_source import ShardConversationSource, ShardSourceConfig
from vitrail.devices import resolve_device
from vitrail.errors import ConfigError
from vitrail.hub.checkpoint_family import ADAPTER_CONFIG_FILE
from vitrail.hub.checkpoint_info import find_checkpoint, resolve_path
from vitrail.hub.peft_adapters import NATIVE_ONLY, check_layers_writable
from vitrail.hub.pretrained import build_on_meta_device, load_tokenizer
from vitrail.models.vlm import VLM
from vitrail.nn.blockwise_quantization import count_parameters
from vitrail.plots.ledger_plot import format_si
from vitrail.recipe.finetune_memory import NUM_BATCHES, count_state_bytes, estimate_activations, read_micro_batches
from vitrail.recipe.recipe_schema import ModelConfig, Recipe, TokenizerConfig
from vitrail.recipe.recipe_training import train_recipe
from vitrail.registry import TASKS
from vitrail.tasks.chat_task import ChatTask
from vitrail.training.lora import LoRAConfig, LoRALinear, add_lora, list_lora_targets, quantize_base
from vitrail.training.lr_schedule import CosineSchedule
from vitrail.training.optimizer import OptimConfig, ParamGroupConfig
from vitrail.training.parameter_names import matches_pattern
from vitrail.training.stage_config import StageConfig, set_trainable_parts
from vitrail.training.task import Batch

SOURCE, STAGE = "conversations", "finetune"
WARMUP = 0.03  # of all steps
LORA_LR, FULL_LR = 1e-4, 1e-5
# Linear layers of the decoder that LoRA adapts by default, as far as the model has them; else all of its blocks.
LORA_TARGETS = tuple(
    f"decoder.*.{layer}" for layer in ("qkv.q", "qkv.k", "qkv.v", "out", "gate_up.gate", "gate_up.up", "down")
)


class FinetuneConfig(Config):
    """Settings of a fine-tuning.

    model           a checkpoint of a vision-language model
    data            a file or folder of any format with turns or captions, or WebDataset shards with these
    data_format     its format; detected if not given
    image_folder    folder of images and videos; the folder of the file if not given
    caption_prompt  question about an image or video that has a caption instead of turns
    method          lora: adapters; full: all weights; qlora: adapters over frozen weights of 4 bits (NF4), with 8-bit
                    optimizer state
    rank, alpha     of the adapters
    targets         patterns of the layers with adapters; default: all linear layers of the decoder's blocks
    lr              peak learning rate; default 1e-4 for LoRA, 1e-5 for all weights
    part_lrs        learning rates of parts, such as {"connector": 1e-5}; 0 freezes a part
    epochs          passes over the data; `steps` overrides it
    batch_size      conversations of a step
    max_length      tokens of a row of packed conversations; default: 2048, or the model's context if that is smaller
    overflow        what happens to a longer conversation: refuse or cut
    save_every      steps between checkpoints
    """

    model: str
    data: str
    data_format: str | None = None
    image_folder: str | None = None
    caption_prompt: str = CAPTION_PROMPT
    method: Literal["lora", "full", "qlora"] = "lora"
    rank: PositiveInt = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    lr: float | None = None
    part_lrs: dict[str, float] = {}
    epochs: float = 1.0
    steps: PositiveInt | None = None
    batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    max_length: PositiveInt | None = None
    overflow: Literal["refuse", "cut"] = "refuse"
    dtype: Literal["float32", "bfloat16"] | None = None
    gradient_checkpointing: bool = False
    save_every: PositiveInt = 100
    num_workers: WorkerCount = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise ConfigError(f"epochs is {self.epochs}", "use a number above 0")
        if self.method == "full" and self.targets:
            raise ConfigError("targets name layers for LoRA, but the method full trains all weights", "remove targets")


class FinetunePlan:
    """A recipe with what it was built from: the model on the meta device and the number of conversations."""

    def __init__(self, config: FinetuneConfig, device: str | None = None):
        self.config, self.device = config, resolve_device(device)
        found = find_checkpoint(resolve_path(config.model))
        if found.model_class is not VLM:
            raise ConfigError(
                f"{config.model} is a {found.model_class.__name__}, but conversations train a vision-language model",
                "give the checkpoint of a vision-language model with a decoder, or write a recipe (vitrail train)",
            )
        self.model: VLM = build_on_meta_device(found)  # type: ignore[assignment]
        source = self._choose_source()
        if isinstance(source, ShardSourceConfig):
            self.source = ShardConversationSource(source, SOURCE)
        else:
            self.source = ConversationSource(source, SOURCE)
        self.recipe = self._build_recipe(source)
        if self.recipe.lora is not None:
            add_lora(self.model, self.recipe.lora)
            if (family := found.family) is not None:
                layers = [name for name, layer in self.model.named_modules() if isinstance(layer, LoRALinear)]
                check_layers_writable(self.model, layers, family)
            if self.recipe.lora.quantization is not None:
                quantize_base(self.model)
        self.recipe.check_stages(self.model)

    @property
    def stage(self) -> StageConfig:
        return self.recipe.stages[0]

    def _choose_source(self) -> ConversationsConfig | ShardSourceConfig:
        config = self.config
        if is_shards(config.data):
            if config.data_format or config.image_folder:
                raise ConfigError(
                    f"{config.data} are shards, which hold their images and have one format",
                    "remove data_format and image_folder",
                )
            return ShardSourceConfig(paths=config.data, contents="conversations", caption_prompt=config.caption_prompt)
        return ConversationsConfig(
            path=config.data,
            format=config.data_format,
            image_folder=config.image_folder,
            caption_prompt=config.caption_prompt,
        )

    def _build_recipe(self, source: ConversationsConfig | ShardSourceConfig) -> Recipe:
        config, context = self.config, self.model.config.decoder.context_length  # type: ignore[union-attr]
        steps = config.steps or math.ceil(len(self.source) * config.epochs / config.batch_size)
        groups = tuple(ParamGroupConfig(part=part, lr=rate) for part, rate in config.part_lrs.items())
        lr = config.lr if config.lr is not None else FULL_LR if config.method == "full" else LORA_LR
        lora = LoRAConfig(
            rank=config.rank,
            alpha=config.alpha,
            target_modules=config.targets or self._list_targets(),
            dropout=config.dropout,
            quantization="nf4" if config.method == "qlora" else None,
        )
        kind: Any = "adamw_8bit" if config.method == "qlora" else "adamw"
        stage = StageConfig(
            name=STAGE,
            task="chat",
            steps=steps,
            batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            mixture=MixtureConfig(weights={SOURCE: 1.0}),
            optim=OptimConfig(
                lr=lr,
                kind=kind,
                betas=(0.9, 0.999),
                weight_decay=0.0,
                param_groups=groups,
            ),
            schedule=CosineSchedule(warmup_steps=int(WARMUP * steps)),
            settings={"max_length": config.max_length or min(2048, context), "overflow": config.overflow},
            trainable=("*",) if config.method == "full" else ("*.lora",),
            save_every=config.save_every,
            dtype=config.dtype or ("bfloat16" if self.device.startswith("cuda") else "float32"),
            gradient_checkpointing=config.gradient_checkpointing,
            num_workers=config.num_workers,
        )
        return Recipe(
            name=STAGE,
            description=f"{config.model} on {config.data}",
            model=ModelConfig(kind="vlm", checkpoint=config.model),
            tokenizer=TokenizerConfig(checkpoint=config.model),
            sources={SOURCE: source},
            stages=(stage,),
            seed=config.seed,
            lora=None if config.method == "full" else lora,
        )

    def _list_targets(self) -> tuple[str, ...]:
        names = list_lora_targets(self.model)
        found = tuple(target for target in LORA_TARGETS if any(matches_pattern(target, name) for name in names))
        if any("qkv" in target for target in found):
            return found
        return tuple(name for name in names if name.startswith("decoder.blocks.") and not name.endswith(NATIVE_ONLY))

    def make_task(self, model: VLM) -> ChatTask:
        """Make the task of the training for a model."""
        task = TASKS[self.stage.task].make_task
        return task(model, {SOURCE: self.source}, load_tokenizer(self.config.model), self.recipe.task_settings(0))  # type: ignore[return-value]

    def read_micro_batches(self, task: ChatTask, limit: int = NUM_BATCHES) -> list[Batch]:
        """Return the first micro-batches of the training."""
        return read_micro_batches(task, self.stage, {SOURCE: self.source}, self.recipe.seed, limit)

    def estimate_memory(self, batches: Sequence[Batch] | None = None) -> dict[str, int]:
        """Estimate the bytes of weights, gradients, optimizer state and activations.

        The state is counted. Activations are those of the largest of the first micro-batches, or of the given ones.
        """
        stage, model = self.stage, self.model.to(getattr(torch, self.stage.dtype))
        set_trainable_parts(model, stage.trainable)
        state, task = count_state_bytes(model, stage), self.make_task(model)
        batches = self.read_micro_batches(task) if batches is None else batches
        beyond = max(estimate_activations(model, task, batch, stage, self.device) for batch in batches)
        return {**state._asdict(), "activations": max(0, beyond - state.gradients)}

    def format_summary(self) -> Iterator[str]:
        """Yield lines for a dry run: modules, parameters, memory, samples and steps."""
        stage, memory = self.stage, self.estimate_memory()
        yield f"{self.config.model}: {type(self.model).__name__}"
        for name, module in self.model.named_children():
            count, trained = count_parameters(module), count_parameters(module, trainable=True)
            if count:
                yield f"  {name:22} {count:>15,} parameters, {trained:>13,} trainable"
        if self.recipe.lora is not None:
            lora = self.recipe.lora
            base = ", over NF4 weights" if lora.quantization is not None else ""
            yield f"LoRA: rank {lora.rank}, alpha {lora.alpha:g}{base}, on {', '.join(lora.target_modules)}"
        yield f"data: {len(self.source):,} conversations of {self.config.data} ({self.source.format_name})"
        if (report := self.source.report()) and report.faults:
            yield f"unreadable so far: {len(report.faults):,}, such as {report.faults[0]}"
        yield f"steps: {stage.steps:,} of {stage.batch_size:,} conversations, {stage.dtype}"
        yield "memory: " + format_si(sum(memory.values()), "B") + " (estimate)"
        for name, size in memory.items():
            yield f"  {name:22} {format_si(size, 'B'):>15}"


def finetune(config: FinetuneConfig, out: Path, *, device: str | None = None, quiet: bool = False) -> Path:
    """Fine-tune and return the folder of the adapter, or of the final weights. The same call resumes.

    The final weights, with merged adapters, are in out/final.
    """
    plan = FinetunePlan(config, device)
    train_recipe(plan.recipe, out, device=device, quiet=quiet)
    return write_model_card(plan, out).parent


def write_model_card(plan: FinetunePlan, out: Path) -> Path:
    """Write README.md next to the trained adapter, or to the final weights."""
    config, stage = plan.config, plan.stage
    folder = out / "adapter" if (out / "adapter" / ADAPTER_CONFIG_FILE).is_file() else out / "final"
    log = out / stage.name / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    losses: list[Any] = [row["loss"] for row in rows if "loss" in row]
    lora = plan.recipe.lora
    name = "LoRA" if lora is None or lora.quantization is None else "QLoRA (NF4 base, 8-bit optimizer state)"
    method = "all weights" if lora is None else f"{name}, rank {lora.rank}, alpha {lora.alpha:g}"
    use = (
        f'pipeline = vitrail.load("{folder}")'
        if folder.name == "final"
        else f'pipeline = vitrail.load("{config.model}", adapter="{folder}")'
    )
    lines = [
        "---",
        f"base_model: {json.dumps(config.model)}",
        "library_name: " + ("vitrail" if folder.name == "final" else "peft"),
        "tags: [vitrail, vision-language-model]",
        "---",
        "",
        f"# {Path(config.model).name}, fine-tuned",
        "",
        "| setting | value |",
        "|---|---|",
        f"| base model | `{config.model}` |",
        f"| data | `{Path(config.data).name}`: {len(plan.source):,} conversations, "
        f"fingerprint `{plan.source.fingerprint}` |",
        f"| method | {method} |",
        f"| steps | {stage.steps:,} of {stage.batch_size} conversations |",
        f"| peak learning rate | {stage.optim.lr:g} |",
        f"| dtype | {stage.dtype} |",
        f"| seed | {plan.recipe.seed} |",
        *([f"| loss | {losses[0]:.4g} at the first logged step, {losses[-1]:.4g} at the last |"] if losses else []),
        "",
        "```python",
        "import vitrail",
        "",
        use,
        "```",
        "",
        "Not evaluated. Run `vitrail eval` before you publish it.",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(lines))
    return folder / "README.md"
