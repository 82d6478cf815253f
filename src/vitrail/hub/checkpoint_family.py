"""Checkpoint family: how one model type of transformers, timm or diffusers is read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.config_schema import check_config_schema
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.hub.tensor_rules import TensorRule
from vitrail.processing import video_sampling
from vitrail.processing.image_preprocessor import name_file_in_errors, read_preprocessor_config
from vitrail.processing.image_processors import HFImageProcessor

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Activation names: transformers → native."""


ADAPTER_STEM, ADAPTER_CONFIG_FILE = "adapter_model", "adapter_config.json"


class AdapterFolder(NamedTuple):
    """Subfolder of a checkpoint with a LoRA adapter in the format of peft.

    name           of the subfolder
    suffixes       suffixes of the adapter's tensors: of the tensor rules → of its file
    write_config   native config → adapter_config.json
    """

    name: str
    suffixes: Mapping[str, str]
    write_config: Callable[[Any], dict[str, Any]]

    def find_stored_name(self, name: str) -> str | None:
        """Return the name of a tensor in the adapter's file; None for other tensors."""
        end = next((suffix for suffix in self.suffixes if name.endswith(suffix)), None)
        return None if end is None else f"base_model.model.{name.removesuffix(end)}{self.suffixes[end]}"


@dataclass(frozen=True)
class CheckpointFamily:
    """One `model_type` of transformers, one kind of `architecture` of timm, or one class of diffusers.

    name                 value of `config_key` in config.json
    model_class          the native model
    from_hf_config       config.json → native config
    to_hf_config         native config → config.json, without model_type and dtype
    supports             whether a native config can be written as this family
    tensor_rules         native config → rules between native and external tensors
    ignored_suffixes     suffixes of tensors that are not parameters
    ignored_prefixes     prefixes of tensors of parts that are not implemented
    duplicate_tensors    tied tensors that some files store twice: (name, the tensor it must equal)
    legacy_prefix        prefix that older files have before every tensor name
    config_key           key of config.json that names the family; diffusers uses _class_name, QLIP has the model_type
                         clip and is identified by its architectures
    weights_stem         stem of the weights files
    legacy_names         parts of tensor names in older files: (current, legacy)
    module_names         prefixes of tensor names → of module names in transformers, where they differ; the last one
                         that fits counts
    image_processor      image processor whose file sets policy, mean and std of the config
    has_video_processor  whether a video processor file sets the config's video sampling
    chat_config          chat template and processor settings of a vision-language model
    add_settings         (config.json, folder) → config.json with settings of other files of the folder
    open_weights         (folder, config.json) → weights of checkpoints with parts in other folders
    adapter              subfolder that holds some of the tensors
    variants             model_type of the vision tower → key of the family that reads such checkpoints instead
    class_defaults       defaults of the config class of transformers, for keys that a config.json leaves out
    part_defaults        key of a part, such as text_config → defaults of its keys
    """

    name: str
    model_class: type
    from_hf_config: Callable[[dict[str, Any]], Any]
    to_hf_config: Callable[[Any], dict[str, Any]]
    supports: Callable[[Any], bool]
    tensor_rules: Callable[[Any], list[TensorRule]]
    ignored_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq", ".position_ids")
    ignored_prefixes: tuple[str, ...] = ()
    duplicate_tensors: tuple[tuple[str, str], ...] = ()
    legacy_prefix: str = ""
    config_key: Literal["model_type", "architecture", "_class_name", "architectures"] = "model_type"
    weights_stem: str = "model"
    legacy_names: tuple[tuple[str, str], ...] = ()
    module_names: tuple[tuple[str, str], ...] = ()
    image_processor: HFImageProcessor | None = None
    has_video_processor: bool = False
    chat_config: ChatConfig | None = None
    add_settings: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None
    open_weights: Callable[[Path, dict[str, Any]], SafetensorsWeights] | None = None
    adapter: AdapterFolder | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    class_defaults: Mapping[str, Any] = field(default_factory=dict)
    part_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def ignores_tensor(self, name: str) -> bool:
        """Whether a tensor of a file is not a parameter of the model."""
        return name.endswith(self.ignored_suffixes) or name.startswith(self.ignored_prefixes)

    def find_stored_name(self, name: str, stored: Any) -> str:
        """Return the name of a tensor in a file, which may be a legacy name."""
        for current, legacy in self.legacy_names:
            if current in name and name not in stored and name.replace(current, legacy) in stored:
                return name.replace(current, legacy)
        return name

    def to_module_name(self, name: str) -> str:
        """Return the name that a tensor or layer of the files has in the module of transformers."""
        fitting = [(stored, module) for stored, module in self.module_names if f"{name}.".startswith(stored)]
        if not fitting:
            return name
        stored, module = fitting[-1]
        return (module + f"{name}.".removeprefix(stored)).removesuffix(".")

    def select_rule(self, rule: TensorRule, stored: Any) -> TensorRule:
        """Return a rule, or its alternative if a file has no tensor of the rule."""
        if rule.alternative is not None and self.find_stored_name(rule.hf[0], stored) not in stored:
            return rule.alternative
        return rule

    def read_config(self, hf_config: dict[str, Any], source: Path) -> Any:
        """Read config.json and the image and video processor files next to it. Errors name the file."""
        try:
            with name_file_in_errors(source):
                check_config_schema(hf_config)
                if self.add_settings is not None:
                    hf_config = self.add_settings(hf_config, source.parent)
                config = self.from_hf_config(hf_config)
            if self.image_processor is None:
                return config
            processor_config, source = read_preprocessor_config(source.parent)
            with name_file_in_errors(source):
                config = (
                    self.image_processor.apply_processor_config(config, processor_config)
                    if processor_config
                    else config
                )
            if not self.has_video_processor:
                return config
            video_config, video_source = read_preprocessor_config(
                source.parent, video_sampling.VIDEO_PROCESSOR_FILE, video_sampling.VIDEO_PROCESSOR_KEY
            )
            if video_config is None and processor_config and "video_sampling" in processor_config:
                video_config, video_source = processor_config, source  # older files of SmolVLM
            with name_file_in_errors(video_source):
                default = config.resolved_video_sampling
                sampling = default.with_processor_config(video_config or {})
                return config if sampling == default else config.replace(video_sampling=sampling)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(
                f"{source} is not a valid config of {self.name}: {type(error).__name__}: {error}",
                "compare it with the config of the original model",
            ) from error


def build_round_trip_check(
    from_hf_config: Callable[[dict[str, Any]], Any],
    to_hf_config: Callable[[Any], dict[str, Any]],
    normalize: Callable[[Any], Any] = lambda config: config,
    image_processor: HFImageProcessor | None = None,
) -> Callable[[Any], bool]:
    """Build the `supports` predicate: a config is supported if it survives writing and reading.

    `normalize` maps equivalent configs to one form before they are compared.
    """

    def supports(config: Any) -> bool:
        try:
            result = from_hf_config(to_hf_config(config))
            result = (
                result
                if image_processor is None
                else image_processor.apply_processor_config(result, image_processor.to_processor_config(config))
            )
            return normalize(result) == normalize(config)
        except VitrailError:
            return False

    return supports


def make_read_only(*families: str) -> dict[str, Any]:
    """Make the fields of a family that no model is exported as; the error names the families to export as."""

    def refuse(config: Any) -> dict[str, Any]:
        raise ConfigError("this layout is read, and not written", f"export as {' or '.join(families)}")

    return {"to_hf_config": refuse, "supports": lambda _config: False}


def fill_defaults(hf_config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in defaults for keys that are missing or null."""
    return {**defaults, **{key: value for key, value in hf_config.items() if value is not None}}


def require_key(settings: dict[str, Any], *keys: str) -> Any:
    """Return the value of the first key that is set. Raises an error if none is."""
    for key in keys:
        if settings.get(key) is not None:
            return settings[key]
    raise CheckpointError(f"{keys[0]!r} is missing", f"add {keys[0]!r}, as in the config of the original model")


def reject_settings(settings: dict[str, Any], **unsupported: str) -> None:
    """Raise an error for unsupported settings, given as key=reason, that are truthy."""
    for key, reason in unsupported.items():
        if settings.get(key):
            raise CheckpointError(f"{key} is {settings[key]!r}: {reason}")
